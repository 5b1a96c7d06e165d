"""Which fault came to what, from a run's event log."""

from __future__ import annotations

from typing import Any

import pytest

from ttprun.chaos.trial.kills import pair


def struck(number: int, fault: str, rank: int | None, at_s: float, pid: int | None = None) -> dict[str, Any]:
    kind = fault.partition(":")[0]
    reported = {"number": number, "fault": fault, "kind": kind, "rank": rank, "at_s": at_s}
    return {"event": "fault_injected", "pid": pid or 100 + number, "step": 5, "phase": "forward"} | reported


def lost(rank: int, pid: int, at_s: float, event: str = "rank_exited") -> dict[str, Any]:
    return {"event": event, "rank": rank, "pid": pid, "code": None, "at_s": at_s}


def incident(number: int, ranks: list[int], opened_at_s: float, total_s: float | None = 1.0) -> dict[str, Any]:
    outcome = "recovered" if total_s is not None else "open"
    reported = {"id": number, "ranks": ranks, "opened_at_s": opened_at_s, "total_s": total_s, "outcome": outcome}
    return {"event": "incident", "rung": "replace", "at_s": opened_at_s + (total_s or 0.0)} | reported


def broken(rank: int, at_s: float) -> dict[str, Any]:
    return {"event": "connection_broken", "rank": rank, "at_s": at_s}


# A log, and of each of its faults the incident and how long it took until somebody noticed it.
KILL, LATER = struck(1, "kill:rank=1", 1, 10.0), struck(2, "kill:rank=0", 0, 20.0)
LOGS: dict[str, tuple[list[dict[str, Any]], list[tuple[int | None, float | None]]]] = {
    "its process is lost": (
        [KILL, lost(1, 101, 10.02), incident(1, [1], 10.02, None), incident(1, [1], 10.02, 0.5),
         struck(2, "segv:rank=0", 0, 20.0), lost(0, 102, 20.1), incident(2, [0], 20.1)], [(1, 0.02), (2, 0.1)],
    ),
    "two ranks are lost together": (
        [struck(1, "abort:rank=1", 1, 10.0), struck(2, "term:rank=0", 0, 10.04), lost(1, 101, 10.07),
         lost(0, 102, 10.1), incident(1, [1, 0], 10.07, 5.0)], [(1, 0.07), (1, 0.06)],
    ),
    "a second fault during a recovery": (
        [KILL, lost(1, 101, 10.02), struck(2, "kill:rank=0", 0, 10.4), lost(0, 102, 10.45),
         incident(1, [1, 0], 10.02, 2.0)], [(1, 0.02), (1, 0.05)],
    ),
    "a hang, when it is reported": (
        [struck(1, "stop:rank=1", 1, 10.0), lost(1, 101, 20.0, "rank_hung"), incident(1, [1], 20.3)], [(1, 10.0)],
    ),
    "a link, noticed by either end": (
        [struck(1, "reset:rank=1", 1, 10.0), broken(0, 10.01), incident(1, [], 10.02)], [(1, 0.01)],
    ),
    "a link that was repaired, before its process is lost": (
        [struck(1, "link:rank=2", 2, 10.0, pid=7), broken(2, 11.0), incident(1, [], 11.01),
         struck(2, "kill:rank=2", 2, 20.0, pid=7), lost(2, 7, 20.01), incident(2, [2], 20.01)], [(1, 1.0), (2, 0.01)],
    ),
    "one that nobody noticed, and a later one": (
        [struck(1, "flip-bit:rank=1", 1, 10.0), LATER, lost(0, 102, 20.05), incident(1, [0], 20.1)],
        [(None, None), (1, 0.05)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGS)
def test_a_fault_belongs_to_the_incident_in_which_it_was_noticed(kind: str) -> None:
    log, expected = LOGS[kind]

    found = pair(log)

    assert [(one.incident, one.detect_s and round(one.detect_s, 3)) for one in found] == expected
    assert [one.is_accounted_for for one in found] == [number is not None for number, _ in expected]


def test_the_outcome_of_an_incident_is_that_of_its_end() -> None:
    log, _ = LOGS["its process is lost"]

    assert [(one.outcome, one.recover_s) for one in pair(log)] == [("recovered", 0.5), ("recovered", 1.0)]


def test_a_nan_comes_to_being_named() -> None:
    log = [struck(1, "nan:rank=1", 1, 10.0), {"event": "nan_found", "rank": 1, "step": 5, "where": "", "at_s": 10.1}]

    assert pair(log)[0].effect == "reported in step 5; it reached the weights"


def test_a_fault_whose_moment_never_came_was_not_caused() -> None:
    log = [{"event": "fault_armed", "number": 1, "fault": "kill:rank=1,phase=validation", "rank": 1}]

    assert [one.failure for one in pair(log)] == ["its moment never came"]


def test_a_fault_that_could_not_be_caused_says_why() -> None:
    armed = {"number": 1, "fault": "reset:rank=1", "rank": 1}
    failed = {"event": "fault_failed", "kind": "reset", "reason": "this rank has no connection"} | armed

    assert [one.failure for one in pair([{"event": "fault_armed"} | armed, failed])] == ["this rank has no connection"]


def test_a_kind_without_an_incident_comes_to_its_own_effect() -> None:
    standby, slept = pair([struck(1, "standby-kill", None, 5.0), struck(2, "sleep:rank=1,seconds=1", 1, 6.0)])

    assert standby.effect == "another standby was started"
    assert slept.effect == "it ended before any rank was missed"
    assert standby.is_accounted_for
    assert slept.is_accounted_for
