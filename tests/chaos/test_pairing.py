"""Which fault came to what, from a run's event log."""

from __future__ import annotations

from typing import Any

from ttprun.chaos.trial.kills import pair


def struck(number: int, fault: str, rank: int | None, at_s: float, pid: int | None = None) -> dict[str, Any]:
    kind = fault.partition(":")[0]
    reported = {
        "number": number,
        "fault": fault,
        "kind": kind,
        "rank": rank,
        "at_s": at_s,
        "step": 5,
        "phase": "forward",
    }
    return {"event": "fault_injected", "pid": 100 + number if pid is None else pid} | reported


def lost(rank: int, pid: int, at_s: float, event: str = "rank_exited") -> dict[str, Any]:
    return {"event": event, "rank": rank, "pid": pid, "code": None, "at_s": at_s}


def incident(number: int, ranks: list[int], opened_at_s: float, total_s: float | None = 1.0) -> dict[str, Any]:
    outcome = "recovered" if total_s is not None else "open"
    reported = {"id": number, "ranks": ranks, "opened_at_s": opened_at_s, "total_s": total_s, "outcome": outcome}
    return {"event": "incident", "rung": "replace", "at_s": opened_at_s + (total_s or 0.0)} | reported


def test_a_fault_belongs_to_the_incident_in_which_its_process_was_lost() -> None:
    log = [
        struck(1, "kill:rank=1", 1, 10.0),
        lost(1, 101, 10.02),
        incident(1, [1], 10.02, None),
        incident(1, [1], 10.02, 0.5),
        struck(2, "segv:rank=0", 0, 20.0),
        lost(0, 102, 20.1),
        incident(2, [0], 20.1),
    ]

    first, second = pair(log)

    assert (first.incident, first.outcome, first.recover_s) == (1, "recovered", 0.5)
    assert first.detect_s is not None
    assert round(first.detect_s, 3) == 0.02
    assert second.incident == 2


def test_two_ranks_that_are_lost_together_are_one_incident() -> None:
    log = [
        struck(1, "abort:rank=1", 1, 10.0),
        struck(2, "term:rank=0", 0, 10.04),
        lost(1, 101, 10.07),
        lost(0, 102, 10.1),
        incident(1, [1, 0], 10.07, 5.0),
    ]

    assert [one.incident for one in pair(log)] == [1, 1]


def test_a_second_fault_during_a_recovery_belongs_to_the_same_incident() -> None:
    log = [
        struck(1, "kill:rank=1", 1, 10.0),
        lost(1, 101, 10.02),
        struck(2, "kill:rank=0", 0, 10.4),
        lost(0, 102, 10.45),
        incident(1, [1, 0], 10.02, 2.0),
    ]

    second = pair(log)[1]

    assert second.incident == 1
    assert second.detect_s is not None
    assert round(second.detect_s, 3) == 0.05


def test_a_hang_is_noticed_when_it_is_reported_and_belongs_to_that_incident() -> None:
    log = [struck(1, "stop:rank=1", 1, 10.0), lost(1, 101, 20.0, "rank_hung"), incident(1, [1], 20.3)]

    found = pair(log)[0]

    assert (found.incident, found.detect_s) == (1, 10.0)


def test_a_broken_link_may_be_noticed_by_either_end() -> None:
    broken = {"event": "connection_broken", "rank": 0, "at_s": 10.01}
    log = [struck(1, "reset:rank=1", 1, 10.0), broken, incident(1, [], 10.02)]

    assert pair(log)[0].incident == 1


def test_a_link_that_was_repaired_is_not_given_the_later_loss_of_its_process() -> None:
    broken = {"event": "connection_broken", "rank": 2, "at_s": 11.0}
    log = [
        struck(1, "link:rank=2", 2, 10.0, pid=7),
        broken,
        incident(1, [], 11.01),
        struck(2, "kill:rank=2", 2, 20.0, pid=7),
        lost(2, 7, 20.01),
        incident(2, [2], 20.01),
    ]

    assert [one.incident for one in pair(log)] == [1, 2]


def test_a_fault_that_nobody_noticed_is_not_given_the_incident_of_a_later_one() -> None:
    log = [
        struck(1, "flip-bit:rank=1", 1, 10.0),
        struck(2, "kill:rank=0", 0, 20.0),
        lost(0, 102, 20.05),
        incident(1, [0], 20.1),
    ]

    first, second = pair(log)

    assert not first.is_accounted_for
    assert second.incident == 1


def test_a_nan_comes_to_being_named() -> None:
    log = [struck(1, "nan:rank=1", 1, 10.0), {"event": "nan_found", "rank": 1, "step": 5, "where": "", "at_s": 10.1}]

    assert pair(log)[0].effect == "reported in step 5; it reached the weights"


def test_a_fault_whose_moment_never_came_was_not_caused() -> None:
    log = [{"event": "fault_armed", "number": 1, "fault": "kill:rank=1,phase=validation", "rank": 1}]

    assert [one.failure for one in pair(log)] == ["its moment never came"]


def test_a_fault_that_could_not_be_caused_says_why() -> None:
    reported = {
        "number": 1,
        "fault": "reset:rank=1",
        "kind": "reset",
        "rank": 1,
        "reason": "this rank has no connection",
    }
    log = [
        {"event": "fault_armed", "number": 1, "fault": "reset:rank=1", "rank": 1},
        {"event": "fault_failed"} | reported,
    ]

    assert [one.failure for one in pair(log)] == ["this rank has no connection"]


def test_a_kind_without_an_incident_comes_to_its_own_effect() -> None:
    standby, slept = pair([struck(1, "standby-kill", None, 5.0), struck(2, "sleep:rank=1,seconds=1", 1, 6.0)])

    assert standby.effect == "another standby was started"
    assert slept.effect == "it ended before any rank was missed"
    assert standby.is_accounted_for
    assert slept.is_accounted_for
