"""When each phase of an incident went on."""

from itertools import pairwise

import pytest

from ttprun.observe.events import seconds_of, spans_of
from ttprun.observe.status import IncidentStatus

SLOW_START = IncidentStatus(
    1, "signal 9", (1,), detect_s=0.1, freeze_s=0.5, spawn_s=31.1, replay_s=1.4, transfer_s=0.2, rebuild_s=0.3,
    reissue_s=0.1, total_s=33.2,
)  # fmt: skip
STANDBY = IncidentStatus(1, "signal 9", (1,), detect_s=0.0, freeze_s=0.5, spawn_s=0.01, replay_s=1.4, total_s=1.9)


@pytest.mark.parametrize("incident", [SLOW_START, STANDBY], ids=["slow start", "standby"])
def test_phases_do_not_overlap_and_add_up_to_the_whole(incident: IncidentStatus) -> None:
    spans = spans_of(incident)

    assert all(before[2] <= after[1] for before, after in pairwise(spans))
    *parts, (last, whole_s) = seconds_of(incident).items()
    assert last == "total"
    assert sum(took_s for _, took_s in parts) == pytest.approx(whole_s)


def test_of_a_start_only_what_the_others_waited_for_is_shown() -> None:
    assert seconds_of(SLOW_START)["spawn"] == pytest.approx(30.6)
    assert seconds_of(STANDBY)["spawn"] == 0


def test_a_phase_that_was_not_reached_has_no_seconds() -> None:
    assert list(seconds_of(STANDBY)) == ["detect", "freeze", "spawn", "replay", "total"]
