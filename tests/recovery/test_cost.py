"""What is said of the loss of a rank before it happens is what happens then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttprun import recovery
from ttprun.recovery import Saved, cost_of_a_loss, cost_of_a_loss_alone
from ttprun.recovery.job import Job
from ttprun.recovery.replicas import Replicas

SHARDED = Replicas(compared_at=1, shards={"w": (0, 1)})


def job_of(ranks: int = 2, in_memory: tuple[Saved, ...] = (), replicas: Replicas = SHARDED, **settings: Any) -> Job:
    """A job that trains."""
    job = recovery.new_job(recovery.Settings(world_size=ranks, **settings))
    members = job.members.with_each(lambda one: replace(one, pid=1, is_protected=True))
    return replace(job, members=members, in_memory=in_memory, replicas=replicas)


def test_a_snapshot_is_only_promised_once_there_is_one() -> None:
    before, after = cost_of_a_loss(job_of()), cost_of_a_loss(job_of(in_memory=(Saved(5),)))

    assert "all ranks start again from the top" in before
    assert after == "all ranks go back to the snapshot of step 5, and the steps since then are lost"


def test_a_snapshot_is_not_promised_where_going_back_is_switched_off() -> None:
    assert "snapshot" not in cost_of_a_loss(job_of(in_memory=(Saved(5),), rungs=frozenset({"replace", "restart"})))


def test_that_the_state_is_saved_is_not_promised_where_the_lost_rank_alone_held_a_part_of_it() -> None:
    costs = [cost_of_a_loss(job_of(max_restarts=0, replicas=held)) for held in (Replicas(compared_at=1), SHARDED)]

    assert costs[0] == "the job ends once its state is saved"
    assert costs[1].startswith("the job ends, and what the script has not saved itself is lost")


def test_a_rank_alone_in_its_job_is_promised_a_snapshot_only_once_there_is_one() -> None:
    own = Saved(9, is_own=True)  # as it was left the last time; it can keep none any more
    alone = job_of(ranks=1, replicas=Replicas(), in_memory=(own,))

    before = cost_of_a_loss_alone(alone, 0, None)
    after = cost_of_a_loss_alone(replace(alone, in_memory=(own, Saved(7))), 0, None)

    assert "snapshot" not in before
    assert after == "it goes back to its snapshot of step 7"
