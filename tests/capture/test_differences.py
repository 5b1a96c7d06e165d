"""Where a replay stands, compared with a record."""

from __future__ import annotations

from tests.capture.records import record_of
from ttprun.capture.replay.jumps import difference_of_stepping


def test_another_optimizer_that_steps_at_the_same_place_is_another_boundary() -> None:
    assert not difference_of_stepping(record_of(stepping=1), 1)
    assert "optimizer 0 steps there" in difference_of_stepping(record_of(stepping=1), 0).text
    assert not difference_of_stepping(record_of(stepping=1), None)
    assert not difference_of_stepping(record_of(stepping=None), 0)
