"""The group starts again on other nodes: what the state machine orders, and what keeps the nodes as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.recovery.test_machine import running_job
from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.process_orders import Action, Rewind
from ttprun.protocol.rank_events import Event, MismatchFound, RankExited, RankStarted, SpawnFailed, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze, Resume
from ttprun.recovery import (
    CheckpointAsked,
    DeadlinePassed,
    FailJob,
    GiveUpResize,
    GroupResized,
    Job,
    JobPhase,
    NodeLost,
    Persist,
    Regroup,
    ResizeAsked,
    Saved,
    Settings,
    StatePersisted,
    advance,
    with_size,
)
from ttprun.recovery.replicas import UNKNOWN


def after(job: Job, *events: Event) -> tuple[Job, list[Action]]:
    """The job after these events, and all that was ordered."""
    ordered: list[Action] = []
    for event in events:
        job, actions = advance(job, event)
        ordered += actions
    return job, ordered


def elastic_job(ranks: int = 2, **settings: object) -> Job:
    return running_job(Settings(world_size=ranks, is_elastic=True, **settings))  # type: ignore[arg-type]


def asked(at_s: float = 1.0) -> ResizeAsked:
    return ResizeAsked(at_s=at_s, reason="node c joins")


def frozen(rank: int, generation: int = 1, boundary: int = 5) -> RankFrozen:
    return RankFrozen(rank=rank, generation=generation, boundary=boundary, digest="", has_group=True, at_s=2.0)


def saving(job: Job) -> Job:
    """All ranks have quiesced at boundary 5, and write their state."""
    job, _ = after(job, asked(), *(frozen(rank) for rank in range(len(job.members))))
    return job


def persisted(why_not: str = "", why_unusable: str = "") -> StatePersisted:
    place = "" if why_not else "/save/5"
    return StatePersisted(at_s=3.0, generation=1, place=place, why_not=why_not, why_unusable=why_unusable)


def ordered(actions: list[Action], kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_the_state_is_saved_and_then_the_group_starts_again() -> None:
    job, actions = after(elastic_job(), asked(), frozen(0), frozen(1), persisted())

    assert [one for one in actions if isinstance(one, Freeze | Persist | Regroup)] == [
        Freeze((0, 1), 1, ()),
        Persist((0, 1), 1, 5, "resize"),
        Regroup("/save/5", 5, Reason(text="node c joins")),
    ]
    assert job.phase is JobPhase.RESTARTING


def test_the_ranks_of_the_new_group_resume_and_no_step_is_lost() -> None:
    job, _ = after(saving(elastic_job()), persisted())

    job = with_size(job, 3)
    job, actions = after(
        job, GroupResized(at_s=4.0, saved=(Saved(5, "/save/5"),), replicas=UNKNOWN, reason="node c joins")
    )

    assert ordered(actions, Rewind) == [Rewind((0, 1, 2), 5, "/save/5")]
    assert (job.phase, len(job.members)) == (JobPhase.REPLAYING, 3)
    assert job.incident is not None
    assert job.incident.rung == "resize"


@pytest.mark.parametrize(
    "outcome", [persisted(why_not="the disk is full"), persisted(why_unusable="only the script knows how to divide it")]
)
def test_what_cannot_be_saved_or_not_be_resumed_on_other_nodes_leaves_the_nodes_as_they_are(
    outcome: StatePersisted,
) -> None:
    job, actions = after(saving(elastic_job()), outcome)

    assert len(ordered(actions, GiveUpResize)) == len(ordered(actions, Resume)) == 1
    assert ordered(actions, Regroup) == []
    assert job.phase is JobPhase.RESUMING


@pytest.mark.parametrize(
    "fault",
    [
        RankExited(rank=1, pid=101, code=None, signal=9, boundary=5, at_s=2.5),
        NodeLost(ranks=(1,), name="node 1", boundary=5, detected_after_s=0.1, reason="gone", at_s=2.5),
        DeadlinePassed(generation=1, name="persist", silent=(), at_s=700.0),
    ],
    ids=["a rank is lost", "a node is lost", "it takes too long"],
)
def test_what_happens_while_the_state_is_being_saved_comes_before_other_nodes(fault: Event) -> None:
    job, actions = after(saving(elastic_job()), fault)

    assert len(ordered(actions, GiveUpResize)) == 1
    assert ordered(actions, FailJob) == ordered(actions, Regroup) == []
    assert job.ending is None


def test_a_job_that_is_ended_meanwhile_ends() -> None:
    job, actions = after(saving(elastic_job()), StopAsked(at_s=2.5, reason="ended by SIGTERM"), persisted())

    assert ordered(actions, Regroup) == []
    assert len(ordered(actions, FailJob)) == 1
    assert job.phase is JobPhase.FAILED


def test_a10_changes_of_the_nodes_use_up_no_restart_and_no_incident_of_a_limit() -> None:
    job = elastic_job(max_restarts=0, max_incidents_per_hour=1)
    for turn in range(5):
        job = replace(saving(job), generation=1)
        job, actions = after(job, persisted())
        assert len(ordered(actions, Regroup)) == 1, turn
        assert job.restarts == 0
        job = replace(elastic_job(max_restarts=0, max_incidents_per_hour=1), openings=job.openings)

    _, actions = after(job, RankExited(rank=1, pid=101, code=None, signal=9, boundary=5, at_s=2.5))

    assert ordered(actions, FailJob) == []


def test_the_nodes_that_are_left_of_a_lost_one_save_their_state_and_start_again_without_it() -> None:
    lost = NodeLost(ranks=(1,), name="node 1", boundary=5, detected_after_s=0.1, reason="gone", at_s=2.0)
    job, _ = after(elastic_job(max_restarts=0), lost)
    job, _ = after(job, SpawnFailed(at_s=2.1, rank=1, reason="the nodes that are left are enough"))

    job, actions = after(job, frozen(0, job.generation), structs.replace(persisted(), generation=job.generation))

    assert [one.place for one in actions if isinstance(one, Regroup)] == ["/save/5"]


def resumed_after_resize() -> Job:
    """Three ranks have resumed from what was saved at boundary 5, and have not taken a step since."""
    job, _ = after(saving(elastic_job(max_restarts=0)), persisted())
    job, _ = after(
        with_size(job, 3), GroupResized(at_s=4.0, saved=(Saved(5, "/save/5"),), replicas=UNKNOWN, reason="c joins")
    )
    return replace(elastic_job(3, max_restarts=0), saved=job.saved, went_back_to=job.went_back_to)


def without_the_last_node(job: Job) -> tuple[Job, list[Action]]:
    """A node is lost before a copy of its rank's records has reached another one, and nobody takes its place."""
    lost = NodeLost(ranks=(2,), name="node 2", boundary=5, detected_after_s=0.1, reason="gone", at_s=5.0)
    job, _ = after(job, lost, SpawnFailed(at_s=5.1, rank=2, reason="the nodes that are left are enough"))
    job, _ = after(job, *(frozen(rank, job.generation) for rank in range(2)))
    return after(job, StatePersisted(at_s=6.0, generation=job.generation, why_not="it would lack variables of rank 2"))


def test_a_node_that_is_lost_before_the_first_step_after_a_resize_costs_no_step() -> None:
    job, actions = without_the_last_node(resumed_after_resize())

    assert [(one.place, one.boundary) for one in actions if isinstance(one, Regroup)] == [("/save/5", 5)]
    assert job.phase is JobPhase.RESTARTING


def test_the_same_again_without_a_step_in_between_ends_the_job() -> None:
    job, _ = without_the_last_node(resumed_after_resize())
    job, _ = after(
        with_size(job, 2), GroupResized(at_s=7.0, saved=(Saved(5, "/save/5"),), replicas=UNKNOWN, reason="a is lost")
    )

    _, actions = without_the_last_node(replace(elastic_job(3, max_restarts=0), saved=job.saved, went_back_to=5))

    assert job.went_back_to == 5
    assert ordered(actions, Regroup) == []
    assert len(ordered(actions, FailJob)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        RankExited(rank=2, pid=202, code=1, signal=None, boundary=5, is_script_error=True, at_s=5.0),
        MismatchFound(rank=0, generation=3, reason=Reason(text="it reads other samples"), at_s=5.0),
    ],
    ids=["its script fails", "a check refuses it"],
)
@pytest.mark.parametrize("has_grown", [True, False])
def test_nodes_that_come_and_cannot_take_part_leave_and_the_others_go_on_from_what_they_have_saved(
    fault: Event, has_grown: bool
) -> None:
    job, _ = after(saving(elastic_job(max_restarts=0)), persisted())
    resized = GroupResized(at_s=4.0, saved=(Saved(5, "/save/5"),), replicas=UNKNOWN, reason="c joins")
    job, _ = after(with_size(job, 3), structs.replace(resized, has_grown=has_grown))
    job, _ = after(job, *(RankStarted(at_s=4.5, rank=rank, pid=200 + rank) for rank in range(3)))

    job, actions = after(job, fault)

    if not has_grown:
        assert len(ordered(actions, FailJob)) == 1
        return
    assert [(one.place, one.is_back) for one in actions if isinstance(one, Regroup)] == [("/save/5", True)]
    assert job.phase is JobPhase.RESTARTING
    job, actions = after(with_size(job, 2), structs.replace(resized, at_s=6.0))
    assert ordered(actions, Rewind) == [Rewind((0, 1), 5, "/save/5")]
    assert not job.is_growing


def test_while_a_repair_goes_on_nodes_wait() -> None:
    job, _ = after(elastic_job(), RankExited(rank=1, pid=101, code=None, signal=9, boundary=5, at_s=0.5))

    later, actions = after(job, asked(), CheckpointAsked(at_s=1.0))

    assert later == job
    assert actions == []
