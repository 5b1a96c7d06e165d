"""What a kill came to, with the reason and the cure."""

from __future__ import annotations

from ttprun.chaos.faults import Fault
from ttprun.chaos.trial.compare import AT_END, OfRank, RunDifference, differences_by_step
from ttprun.chaos.trial.kills import KillOutcome, blamed, refused
from ttprun.protocol.reason import Reason

KILL = Fault("kill", rank=1, step=5, phase="backward")


def of_rank(*digests: str) -> OfRank:
    found = {at: {"weights or optimizer state": one, "random numbers": "r"} for at, one in enumerate(digests, 1)}
    return OfRank(digests=found)


def row(step: int) -> KillOutcome:
    return KillOutcome("backward", step, 1, "exact", "", "replace", 0)


def test_a_difference_is_laid_at_the_listener_of_the_last_kill_before_it() -> None:
    found = differences_by_step({0: of_rank("a", "b", "x", "y")}, {0: of_rank("a", "b", "c", "d")})

    rows = blamed([row(0), row(2), row(4)], found)

    assert [one.boundary for one in found] == [3]
    assert [one.result for one in rows] == ["exact", "differs", "exact"]
    assert "weights or optimizer state of rank 0" in rows[1].detail


def test_what_differs_at_the_end_only_is_no_single_kills() -> None:
    assert blamed([row(0)], [RunDifference(AT_END, "file log.txt")]) == [row(0)]


def test_a_boundary_that_one_of_them_has_not_noted_is_not_compared() -> None:
    assert differences_by_step({0: OfRank()}, {0: of_rank("a")}) == []


def test_a_refusal_names_the_place_and_what_to_do() -> None:
    found = refused(KILL, "refused", Reason("other-batch", "the step is taken within a comprehension (train.py:12)"))

    assert found.place == "train.py:12"
    assert "let dataset and sampler" in found.cure


def test_a_refusal_without_a_known_cure_points_to_the_limits() -> None:
    assert "ttprun guide limits" in refused(KILL, "refused", Reason(text="something else")).cure
