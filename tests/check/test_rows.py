"""Which row a kill gets, from what its run has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ttprun.chaos.faults import Fault
from ttprun.chaos.trial.compare import Trial
from ttprun.chaos.trial.kills import rows_of
from ttprun.chaos.trial.twins import Twin
from ttprun.observe.status import IncidentStatus, RunStatus

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
