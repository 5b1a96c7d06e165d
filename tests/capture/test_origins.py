"""What the set-up takes from outside: the time, the system's randomness; a replacement's set-up gets the same."""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import pytest

from tests.rank.processes import run_alone
from ttprun.capture.effects import origins
from ttprun.introspect import ownership
from ttprun.rank.bootstrap import patch_table


def names() -> dict[str, str]:
    """A name by each way to ask for the time."""
    return {
        "now": datetime.datetime.now().isoformat(),
        "aware": datetime.datetime.now(datetime.UTC).isoformat(),
        "today": datetime.datetime.today().isoformat(),
        "time": str(time.time()),
        "nanoseconds": str(time.time_ns()),
        "local": str(time.localtime()),
        "greenwich": str(time.gmtime(None)),
        "text": time.ctime(),
        "formatted": time.strftime("%H%M%S"),
        "asctime": time.asctime(),
        "uuid": uuid.uuid4().hex,
    }


def begin_listening() -> None:
    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_early(is_mindio=False)
    origins.listen()


def names_of_two_runs() -> list[Any]:
    """Of a run and of its replay 1.1 s later, and what each has kept."""
    found: list[Any] = []
    for known in (None, 0):
        begin_listening()
        kept: list[Any] = []
        origins.begin([] if known is None else found[1], None if known == 0 else kept.append)
        found += [names(), kept]
        origins.end()
        time.sleep(1.1)
    return found


def test_a_replay_gets_the_same_time_and_randomness_in_the_same_places() -> None:
    first, drawn, second, drawn_again = run_alone(names_of_two_runs)

    assert second == first
    assert (len(drawn), len(drawn_again)) == (len(first), 0)


def names_early() -> tuple[Any, list[Any]]:
    begin_listening()
    name = time.strftime("%H%M%S"), time.time()
    kept: list[Any] = []
    origins.begin([], kept.append)
    return name, [place.partition("|")[0] for place, _ in kept]


def test_what_is_drawn_before_torch_is_there_is_kept_too() -> None:
    _, kinds = run_alone(names_early)

    assert kinds == ["strftime", "time"]


def around_the_first_step() -> list[Any]:
    begin_listening()
    before = type(datetime.datetime.__dict__["now"]).__name__
    origins.end()
    return [before, type(datetime.datetime.__dict__["now"]).__name__, datetime.datetime.now().year]


def test_from_the_first_step_on_the_clock_is_pythons_own() -> None:
    assert run_alone(around_the_first_step) == [
        "classmethod",
        "classmethod_descriptor",
        datetime.datetime.now().year,
    ]


def kept_of(what: str) -> list[str]:
    begin_listening()
    kept: list[Any] = []
    origins.begin([], kept.append)
    if what == "secret":
        import secrets

        secrets.token_bytes(8)
    elif what == "library":
        import logging

        logging.LogRecord("name", 20, "file", 1, "text", (), None)
    elif what == "pid":
        os.getpid()
    elif what == "many":
        for _ in range(10 * origins.MOST_AT_ONE_PLACE):
            time.time()
    return [place.partition("|")[0] for place, _ in kept]


def test_secrets_what_libraries_ask_for_themselves_and_the_scripts_own_pid_are_not_kept() -> None:
    assert [run_alone(kept_of, what) for what in ("secret", "library", "pid")] == [[], [], []]


def test_what_is_asked_again_and_again_is_kept_a_few_times() -> None:
    assert len(run_alone(kept_of, "many")) == origins.MOST_AT_ONE_PLACE


class Later(datetime.datetime):
    """A class of the user's."""


def of_a_subclass() -> list[str]:
    begin_listening()
    return [type(Later.now()).__name__, type(Later.utcnow()).__name__, str(Later.now(tz=datetime.UTC).tzinfo)]


def test_a_subclass_of_datetime_gives_its_own_kind() -> None:
    assert run_alone(of_a_subclass) == ["Later", "Later", "UTC"]


def test_it_is_reported_where_the_methods_of_datetime_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise TypeError("kept otherwise")

    monkeypatch.setattr(origins, "_set_datetime", fail)
    monkeypatch.setattr(origins, "_originals", {})
    monkeypatch.setattr(origins, "_why_no_datetime", "")

    origins._patch_datetime()

    assert "a replacement gets another datetime.now()" in origins.why_not()
