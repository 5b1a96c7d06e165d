"""MindIO's environment variables: heeded, or refused in one line, and only with --mindio."""

from __future__ import annotations

import pytest
from mindio_ttp import framework_ttp

from ttprun.config_sources import resolve
from ttprun.errors import ConfigError
from ttprun.introspect.current_rank import Rank
from ttprun.mindio import NOT_NEEDED, VARIABLES

LIMITS = ("freeze_timeout_s", "transfer_timeout_s", "resume_timeout_s")
REPLICAS = [{"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 1}]


@pytest.mark.parametrize(("given", "limits"), [({}, (300, 300, 300)), ({"transfer_timeout_s": "900"}, (300, 900, 300))])
def test_the_limit_of_a_callback_is_the_limit_of_each_phase_that_the_user_has_not_set(
    given: dict[str, object], limits: tuple[float, ...]
) -> None:
    config = resolve([], {"TTP_NORMAL_ACTION_TIME_LIMIT": "300"}, {"mindio": True, **given})

    assert tuple(getattr(config, key) for key in LIMITS) == limits


def test_without_mindio_its_variables_are_nobodys_business() -> None:
    config = resolve([], {"TTP_NORMAL_ACTION_TIME_LIMIT": "300", "TTP_FRAMEWORK_TYPE": "no"}, {})

    assert config.freeze_timeout_s == 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "30"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "1800"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", ""),
        ("TTP_FRAMEWORK_TYPE", "1"),
        ("TTP_STOP_CLEAN_BEFORE_DUMP", "1"),
        ("MINDIO_FOR_MINDSPORE", "False"),
    ],
)
def test_a_value_that_will_do_is_taken(name: str, value: str) -> None:
    resolve([], {name: value}, {"mindio": True})


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "29", "give 30 to 1800 seconds, or unset it"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "1801", "give 30 to 1800 seconds, or unset it"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "3m", "give 30 to 1800 seconds, or unset it"),
        ("TTP_FRAMEWORK_TYPE", "2", "give 0 or 1, or unset it"),
        ("TTP_STOP_CLEAN_BEFORE_DUMP", "0", "unset it: this cannot be switched off here"),
        ("MINDIO_FOR_MINDSPORE", "tRUE", "unset it: MindSpore does not run under ttprun"),
        ("MINDIO_FOR_MINDSPORE", "1", "unset it: MindSpore does not run under ttprun"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(name: str, value: str, cure: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve([], {name: value}, {"mindio": True})

    assert str(refused.value) == f"--mindio: {name} is '{value}'; {cure}"


@pytest.mark.parametrize(("kind", "shift"), [("0", 0), ("1", 1), (None, 0)])
def test_a_shift_counts_for_a_framework_of_the_kind_that_uses_it(
    session: Rank, monkeypatch: pytest.MonkeyPatch, kind: str | None, shift: int
) -> None:
    if kind is None:
        monkeypatch.delenv("TTP_FRAMEWORK_TYPE", raising=False)
    else:
        monkeypatch.setenv("TTP_FRAMEWORK_TYPE", kind)

    framework_ttp.tft_set_optimizer_replica(0, REPLICAS)

    (sent,) = session.channel.sent  # type: ignore[attr-defined]
    assert sent.groups[0].shift == shift


def test_no_variable_is_both_heeded_and_not() -> None:
    assert not VARIABLES.keys() & NOT_NEEDED.keys()
