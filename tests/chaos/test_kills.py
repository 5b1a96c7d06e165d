"""What a check kills, and what a kill came to: its row, with the reason and the cure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ttprun.chaos.injected_faults import Fault
from ttprun.chaos.trial.compare import AT_END, OfRank, RunDifference, Trial, differences_by_step
from ttprun.chaos.trial.kills import LEAST_GAP, KillOutcome, blamed, plan, refused, rows_of
from ttprun.chaos.trial.twins import Twin
from ttprun.observe.status import IncidentStatus, RunStatus
from ttprun.protocol.reason import Reason

PHASES = ("forward", "backward", "collective", "before_step", "in_step", "after_step")


def seen(steps: int, *more: tuple[str, int]) -> dict[int, set[tuple[str, int]]]:
    moments = {("setup", 0), *more} | {(phase, step) for phase in PHASES for step in range(steps)}
    return {0: moments, 1: moments}


def test_each_phase_of_a_step_is_tried_once_and_one_of_them_late_again() -> None:
    launches, missed = plan(seen(16), 16, [0, 1])

    assert [[(one.phase, one.step, one.rank) for one in kills] for kills in launches] == [
        [
            ("setup", 0, 1),
            ("forward", 2, 0),
            ("backward", 4, 1),
            ("collective", 6, 0),
            ("before_step", 8, 1),
            ("in_step", 10, 0),
            ("after_step", 12, 1),
            ("backward", 14, 0),
        ]
    ]
    assert missed == ["validation", "checkpoint"]


def test_kills_that_could_overlap_go_to_another_launch() -> None:
    launches, _ = plan(seen(6), 6, [0, 1])

    steps = [[one.step or 0 for one in kills] for kills in launches]
    gaps = [after - before for kills in steps for before, after in pairwise(kills)]
    assert len(launches) == 3
    assert min(gaps) == LEAST_GAP
    assert max(max(kills) for kills in steps) <= 4


def test_validation_and_checkpoints_are_tried_where_the_steps_come_to_them() -> None:
    launches, missed = plan(seen(16, ("validation", 7), ("checkpoint", 7)), 16, [0, 1])

    tried = {(one.phase, one.step) for kills in launches for one in kills}
    assert {("validation", 7), ("checkpoint", 7)} <= tried
    assert missed == []


def test_one_rank_alone_is_killed_itself() -> None:
    launches, missed = plan({0: seen(16)[0] - {("collective", step) for step in range(16)}}, 16, [0])

    assert {one.rank for kills in launches for one in kills} == {0}
    assert "collective" in missed


@pytest.mark.parametrize("ranks", [[0, 3, 1, 2], [0, 7, 1, 2, 3, 4, 5, 6]])
def test_each_rank_that_is_named_is_killed(ranks: list[int]) -> None:
    moments = dict.fromkeys(ranks, seen(16)[0])

    launches, _ = plan(moments, 16, ranks)

    kills = [one for planned in launches for one in planned]
    assert {one.rank for one in kills} == {*ranks}
    assert {one.phase for one in kills} == {"setup", *PHASES}


def test_a_rank_that_alone_validates_is_killed_there() -> None:
    moments = seen(16)[0]

    launches, _ = plan({0: moments, 3: moments, 1: moments | {("validation", 7)}}, 16, [0, 3, 1])

    assert [one.rank for planned in launches for one in planned if one.phase == "validation"] == [1]


def test_a_script_that_takes_no_step_has_no_moment() -> None:
    launches, _ = plan({}, 16, [0])

    assert launches == []


FIRST, SECOND = (Fault("kill", rank=1, step=step, phase="backward") for step in (2, 4))


def events_of(*faults: Fault) -> list[dict[str, object]]:
    """Each fault strikes, is noticed, and its incident is over within a second."""
    found: list[dict[str, object]] = []
    for number, fault in enumerate(faults, 1):
        at_s, pid = 10.0 * number, 100 + number
        reported = {"fault": str(fault), "kind": "kill", "rank": 1, "phase": "backward", "step": fault.step}
        found.append({"event": "fault_injected", "number": number, "pid": pid, "at_s": at_s, **reported})
        found.append({"event": "rank_exited", "rank": 1, "pid": pid, "code": None, "at_s": at_s + 0.01})
        incident = {"event": "incident", "id": 2 * number - 1, "ranks": [1], "opened_at_s": at_s, "at_s": at_s + 1}
        found.append({**incident, "rung": "replace", "outcome": "recovered", "total_s": 1.0})
    return found


def trial(faults: list[Fault], *incidents: IncidentStatus) -> Trial:
    reported = {"run_id": "r", "state": "done", "generation": 1, "world_size": 2, "agent_pid": 1}
    status = RunStatus(**reported, started_at="", updated_at="", incidents=incidents)  # type: ignore[arg-type]
    twin = Twin(Path(), 0, 1.0, {}, status=status, events=events_of(*faults))
    return Trial(twin, {}, Path(), [], lambda text: text.replace("/copy/", ""))


def incident(
    number: int, rung: str = "replace", outcome: str = "recovered", why: str = "", kind: str = ""
) -> IncidentStatus:
    said = {"reason": f"it died; not replaced: {why}", "why": why, "reason_kind": kind}
    return IncidentStatus(number, "signal 9", (1,), rung, outcome, **said, steps_lost=0, total_s=1.0)


def test_a_replaced_rank_is_exact_and_a_kill_that_has_not_struck_is_left() -> None:
    rows, left = rows_of(trial([FIRST], incident(1)), [FIRST, SECOND])

    assert [(row.result, row.rung, row.steps_lost) for row in rows] == [("exact", "replace", 0)]
    assert left == [SECOND]


def test_what_is_found_wrong_after_a_repair_is_laid_at_its_kills_listener() -> None:
    mismatch = incident(2, "restart", "failed", "a loop in /copy/train.py:7")

    rows, _ = rows_of(trial([FIRST], incident(1), mismatch), [FIRST])

    assert [(row.result, row.detail, row.place) for row in rows] == [("refused", "a loop in train.py:7", "train.py:7")]


def test_to_go_back_to_step_0_is_called_a_start_from_the_beginning() -> None:
    anew = replace(incident(1, "rewind", why="nothing of its state is left; it starts anew"), boundary=0)

    rows, _ = rows_of(trial([FIRST], anew), [FIRST])

    assert (rows[0].result, rows[0].rung) == ("by a weaker rung", "a start from the beginning")


def test_what_helps_is_that_of_the_reasons_kind() -> None:
    unseeded = incident(1, "restart", "failed", "other weights", "other-weights")
    alone = incident(3, "restart", "restarted", "no other rank holds what rank 1 held", "state-of-one-rank")

    rows, _ = rows_of(trial([FIRST, SECOND], unseeded, alone), [FIRST, SECOND])

    assert (rows[0].detail, "seed the weights" in rows[0].cure) == ("other weights", True)
    assert "--buddy" in rows[1].cure
    assert "--snapshot-every" in rows[1].cure


def test_a_later_kills_incident_is_not_an_earlier_ones() -> None:
    restarted = incident(3, "restart", "restarted", "weights differ")

    rows, _ = rows_of(trial([FIRST, SECOND], incident(1), restarted), [FIRST, SECOND])

    assert [row.result for row in rows] == ["exact", "by a weaker rung"]


KILL = Fault("kill", rank=1, step=5, phase="backward")


def of_rank(*digests: str) -> OfRank:
    return OfRank(links={step: {"p": one, "o": "r"} for step, one in enumerate(digests, 1)})


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
