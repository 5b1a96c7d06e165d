"""The job as the next agent takes it over when the one that led is lost, with all of its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ttprun.protocol.codec import decode, encode
from ttprun.protocol.meeting import GroupMembership, Known, Legacy
from ttprun.protocol.process_orders import SpawnRank
from ttprun.protocol.rank_events import RankExited
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze
from ttprun.recovery import Job, JobPhase, NodeLost, Saved, Settings, advance, known_of, new_job, succeed
from ttprun.recovery.members import RankState
from ttprun.recovery.replicas import Replicas

COMPARED = Known(incidents=2, restarts=1, compared_at=1)


def remaining(rank: int, **changes: Any) -> Legacy:
    given: dict[str, Any] = {"pid": 100 + rank, "is_protected": True, "membership": GroupMembership.JOINED}
    return Legacy(rank=rank, **given | changes)


def taken_over(*ranks: Legacy, known: Known = COMPARED, generation: int = 4) -> Job:
    return succeed(Settings(world_size=len(ranks)), ranks, generation, known)


def lost_with_leader(*ranks: int) -> NodeLost:
    return NodeLost(at_s=10.0, ranks=ranks, name="node 0", boundary=20, reason="it was killed")


def test_the_lost_leaders_ranks_are_replaced_as_those_of_any_lost_node_in_a_new_generation() -> None:
    job = taken_over(remaining(0, pid=0), remaining(1), remaining(2))

    job, actions = advance(job, lost_with_leader(0))

    assert (job.phase, job.generation, job.lost) == (JobPhase.FREEZING, 5, (0,))
    assert actions[0] == Freeze((1, 2), 5, (0,))
    assert SpawnRank(0, 5) in actions
    assert job.incident is not None
    assert (job.incident.id, job.incident.kind, job.incident.rung) == (3, "node-lost", "replace")


def test_an_incident_that_was_open_is_begun_again_with_all_that_is_lost() -> None:
    job = taken_over(remaining(0, pid=0), remaining(1), remaining(2))
    job, _ = advance(job, lost_with_leader(0))

    half_repaired = RankExited(at_s=10.0, rank=2, pid=102, code=None, signal=9, boundary=20, reason="not caught up")
    job, actions = advance(job, half_repaired)

    assert (job.phase, job.lost) == (JobPhase.FREEZING, (0, 2))
    assert Freeze((1,), job.generation, (0, 2)) in actions
    assert job.incident is not None
    assert job.incident.ranks == (0, 2)
    assert job.incident.attempt == 1


def test_what_the_ranks_had_reported_still_holds() -> None:
    known = Known(unprotected=Reason(text="rank 1 uses fork"), compared_at=1)
    job = taken_over(remaining(0), remaining(1, hindrance=Reason(text="a lambda")), remaining(2, is_finished=True))
    unprotected = taken_over(remaining(0, pid=0), remaining(1), known=known)

    unprotected, _ = advance(unprotected, lost_with_leader(0))

    assert [member.hindrance.text for member in job.members] == ["", "a lambda", ""]
    assert job.members[2].life is RankState.FINISHED
    assert job.restarts == 1
    assert unprotected.incident is not None or unprotected.phase is not JobPhase.RUNNING
    assert unprotected.phase is not JobPhase.FREEZING


def test_without_a_comparison_that_is_known_nothing_is_repaired_from_others() -> None:
    job = taken_over(remaining(0, pid=0), remaining(1), known=Known())

    assert job.replicas.why_no_source(0, (1,))


def test_what_all_have_resumed_from_is_known_to_the_next_leader() -> None:
    job = new_job(Settings(world_size=2))
    replicas = Replicas(
        compared_at=3,
        differing={"w": (0, 0)},
        shards={"v": (0, 1)},
        names={"w": "weight"},
        mirrored=frozenset({1}),
        has_collective_steps=True,
    )
    job = replace(job, saved=(Saved(3, "/save/3"),), replicas=replicas, incident_count=2, restarts=1)
    (line,) = encode(known_of(job, "")).splitlines()

    next_one = taken_over(remaining(0), remaining(1), known=decode(line, {"Known": Known}))

    assert (next_one.saved, next_one.replicas) == (job.saved, replicas)
    assert (next_one.incident_count, next_one.restarts) == (2, 1)


def test_a_rank_of_which_nothing_is_known_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="nothing is known of rank 1"):
        succeed(Settings(world_size=2), [remaining(0)], 0, COMPARED)
