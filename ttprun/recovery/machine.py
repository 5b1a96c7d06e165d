"""The machine: `advance(job, event) -> (job, actions)`.

TRANSITIONS gives for each phase and event the handler, and the phases to which it can lead. Pairs that change nothing
are listed too, with the reason; a missing pair is our bug, and raises. While healthy ranks are replaced, and their old
processes kept, `on_request.keep_to_plan` may lead back to FREEZING instead.

A rank that trains without a process group is a job of its own with the same table: `alone.py`.

Read TRANSITIONS first, then `on_loss.answer_fault`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttprun.protocol.from_rank import (
    RankFaulted,
    RankFrozen,
    RankHindered,
    RankJoined,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    RankTrainsAlone,
    RankUnprotected,
    StateSent,
)
from ttprun.protocol.rank_events import (
    Event,
    MismatchFound,
    RankEvent,
    RankExited,
    RankStarted,
    RepairEvent,
    SpawnFailed,
    StopAsked,
)
from ttprun.recovery import alone, on_hang, on_leave, on_loss, on_request, repair
from ttprun.recovery.job import Job
from ttprun.recovery.job import JobPhase as P
from ttprun.recovery.job_events import (
    CheckpointAsked,
    ConnectionBroken,
    DeadlinePassed,
    DowngradeAsked,
    ElasticDeclared,
    GroupResized,
    GroupRestarted,
    NodeLost,
    RankDiverged,
    RankHung,
    RanksCompared,
    ReplacementAsked,
    ResizeAsked,
    ResumeAsked,
    SnapshotTaken,
    StatePersisted,
    StepDiffers,
    SupervisorRenewed,
    UpgradeAsked,
)
from ttprun.recovery.members import changed
from ttprun.recovery.phases import ForbiddenTransition, MachineError, MissingTransition, Result, unchanged

STORY_LENGTH = 40

Handler = Callable[[Job, Any], Result]


@dataclass(frozen=True, slots=True)
class Transition:
    """What one event does in one phase.

    handler    answers it
    leads_to   phases in which the job can be afterwards
    why        for a row that changes nothing: why not
    """

    handler: Handler
    leads_to: tuple[P, ...]
    why: str = ""


Key = tuple[P, type[Event]]


def row(handler: Handler, *leads_to: P) -> Transition:
    """One line of the table."""
    return Transition(handler, leads_to)


def ignored(phase: P, why: str, *event_types: type[Event]) -> dict[Key, Transition]:
    """Lines of the table that change nothing.

    why   the reason, for all of them
    """
    return {(phase, event_type): Transition(unchanged, (phase,), why) for event_type in event_types}


OF_CHECKPOINTS = (SnapshotTaken, ResumeAsked, CheckpointAsked, ResizeAsked, StatePersisted)
OF_MEMBERSHIP = (RankTrainsAlone, RankJoined)
OF_SIZE = (ElasticDeclared, DowngradeAsked, UpgradeAsked)

# Where a fault can lead: another attempt, or one of the ways down: back to a snapshot (REPLAYING), a restart, the end
# (by way of PERSISTING).
DOWN = (P.REPLAYING, P.RESTARTING, P.PERSISTING, P.FAILED)
END = (P.PERSISTING, P.FAILED)
OVER = (P.REPLAYING, P.RESTARTING, P.FAILED)
ANSWERS = (P.FREEZING, P.DRAINING, *DOWN)


def noting(changes: Callable[[Any], dict[str, Any]]) -> Handler:
    """A handler that changes the member of the event's rank and nothing else."""
    return lambda job, event: (job.with_member(event.rank, **changes(event)), ())


NOTED: dict[type[Event], Handler] = {
    RankProtected: noting(lambda event: {"is_protected": True}),
    RankHindered: noting(lambda event: {"hindrance": event.reason}),
    RankTrainsAlone: noting(lambda event: {"membership": event.membership}),
    RankJoined: alone.on_joined,
    SnapshotTaken: on_request.on_snapshot,
    ElasticDeclared: noting(lambda event: {"elastic": event}),  # the newest word counts
}


def noted(phase: P) -> dict[Key, Transition]:
    """Lines of the table for what is only noted while the phase goes on."""
    return {(phase, event_type): row(handler, phase) for event_type, handler in NOTED.items()}


def begun_anew(phase: P) -> dict[Key, Transition]:
    """Lines of the table for a group that the agent has started again."""
    return {
        (phase, GroupRestarted): row(on_loss.on_group_restarted, P.RUNNING),
        (phase, GroupResized): row(on_request.on_group_resized, P.REPLAYING, P.RUNNING),
    }


def in_repair(phase: P) -> dict[Key, Transition]:
    """Lines of the table that all phases of a repair share."""
    return {
        **noted(phase),
        **begun_anew(phase),
        **ignored(phase, "a repair comes first", CheckpointAsked, StatePersisted, ReplacementAsked, UpgradeAsked),
        **ignored(phase, "a repair comes first", ResizeAsked, StepDiffers),
        **ignored(phase, "all ranks have been started", ResumeAsked),
        (phase, DeadlinePassed): row(on_hang.on_deadline, phase, *ANSWERS),
        (phase, SupervisorRenewed): row(on_hang.on_renewed_in_repair, *ANSWERS),
    }


def before_resuming(phase: P) -> dict[Key, Transition]:
    """Lines of the table that the phases of a repair share as long as no connection is made again."""
    return {
        **in_repair(phase),
        (phase, RankUnprotected): row(on_loss.on_unprotected_in_repair, *DOWN),
        (phase, RankFaulted): row(on_loss.on_faulted, *ANSWERS),
        (phase, RankHung): row(on_hang.on_unfit, *ANSWERS),
        (phase, RankDiverged): row(on_hang.on_unfit, *ANSWERS),
        (phase, StopAsked): row(on_loss.on_stop, *END),
        **ignored(phase, "all connections are cut anyway", ConnectionBroken),
    }


TRANSITIONS: dict[Key, Transition] = {
    **noted(P.RUNNING),
    **begun_anew(P.RUNNING),
    (P.RUNNING, RankStarted): row(on_leave.unless_away(repair.on_started), P.RUNNING),
    (P.RUNNING, SpawnFailed): row(on_leave.forget_spawn, P.RUNNING),
    (P.RUNNING, RankUnprotected): row(on_loss.on_unprotected, P.RUNNING),
    (P.RUNNING, RanksCompared): row(on_loss.on_compared, P.RUNNING),
    (P.RUNNING, RankExited): row(on_loss.on_exit, P.RUNNING, P.DONE, *ANSWERS),
    (P.RUNNING, RankFaulted): row(on_loss.on_faulted, *ANSWERS),
    (P.RUNNING, RankHung): row(on_hang.on_unfit, P.RUNNING, *ANSWERS),
    (P.RUNNING, NodeLost): row(on_loss.on_node_lost, P.RUNNING, *ANSWERS),
    (P.RUNNING, RankDiverged): row(on_hang.on_unfit, *ANSWERS),
    (P.RUNNING, StepDiffers): row(on_loss.on_step_differs, *DOWN),
    (P.RUNNING, ConnectionBroken): row(on_hang.on_connection_broken, P.RUNNING, P.FREEZING, *DOWN),
    (P.RUNNING, ReplacementAsked): row(on_request.on_replacement_asked, P.RUNNING, P.FREEZING),
    (P.RUNNING, UpgradeAsked): row(on_request.on_upgrade_asked, P.RUNNING, P.FREEZING),
    **ignored(P.RUNNING, "no rank is lost", DowngradeAsked),
    (P.RUNNING, MismatchFound): row(on_loss.on_mismatch_in_running, *DOWN),
    (P.RUNNING, StopAsked): row(on_loss.on_stop, *END),
    (P.RUNNING, ResumeAsked): row(on_request.on_resume_asked, P.REPLAYING),
    (P.RUNNING, CheckpointAsked): row(on_request.on_checkpoint_asked, P.RUNNING, P.PERSISTING),
    (P.RUNNING, ResizeAsked): row(on_request.on_resize_asked, P.RUNNING, P.PERSISTING),
    **ignored(P.RUNNING, "it came too late", StatePersisted),
    **ignored(P.RUNNING, "reported twice: its repair is over", RankFrozen, RankReplayed, StateSent, RankRepaired),
    **ignored(P.RUNNING, "reported twice: its repair is over", RankRebuilt, RankReissued),
    **ignored(P.RUNNING, "a deadline of a repair that is over", DeadlinePassed),
    **ignored(P.RUNNING, "nothing was being done", SupervisorRenewed),
    #
    **before_resuming(P.FREEZING),
    (P.FREEZING, RankStarted): row(on_leave.unless_away(repair.on_started_in_freezing), P.FREEZING, P.RESUMING),
    (P.FREEZING, SpawnFailed): row(on_leave.on_spawn_failed, P.FREEZING, *DOWN),
    (P.FREEZING, RanksCompared): row(on_loss.on_compared, P.FREEZING),
    (P.FREEZING, RankExited): row(on_loss.on_exit_in_repair, P.DONE, *ANSWERS),
    (P.FREEZING, RankFrozen): row(repair.on_frozen, P.FREEZING, P.REPLAYING, P.RESUMING, *DOWN),
    (P.FREEZING, MismatchFound): row(repair.give_up_on_mismatch, *DOWN),
    (P.FREEZING, NodeLost): row(on_loss.on_node_lost, *ANSWERS),
    (P.FREEZING, DowngradeAsked): row(on_request.on_downgrade_asked, P.FREEZING),
    **ignored(P.FREEZING, "not asked for yet", RankReplayed, StateSent, RankRepaired, RankRebuilt, RankReissued),
    #
    **before_resuming(P.REPLAYING),
    (P.REPLAYING, RankStarted): row(on_leave.unless_away(repair.on_started_in_replaying), P.REPLAYING, P.RESUMING),
    (P.REPLAYING, SpawnFailed): row(on_leave.on_spawn_failed, P.FREEZING, *DOWN),
    (P.REPLAYING, RanksCompared): row(on_loss.on_compared_in_repair, P.REPLAYING, *DOWN),
    (P.REPLAYING, RankExited): row(on_loss.on_exit_in_repair, *ANSWERS),
    (P.REPLAYING, RankReplayed): row(repair.on_replayed, P.REPLAYING, P.TRANSFERRING, *DOWN),
    (P.REPLAYING, MismatchFound): row(on_hang.on_mismatch, P.FREEZING, *DOWN),
    (P.REPLAYING, NodeLost): row(on_loss.on_node_lost, P.REPLAYING, *ANSWERS),
    (P.REPLAYING, DowngradeAsked): row(on_request.on_downgrade_asked, P.REPLAYING, P.FREEZING),
    **ignored(P.REPLAYING, "reported twice: all survivors are quiesced", RankFrozen),
    **ignored(P.REPLAYING, "not asked for yet", StateSent, RankRepaired, RankRebuilt, RankReissued),
    #
    **before_resuming(P.TRANSFERRING),
    (P.TRANSFERRING, RankStarted): row(on_leave.unless_away(repair.on_started), P.TRANSFERRING),
    (P.TRANSFERRING, SpawnFailed): row(on_leave.on_spawn_failed, P.TRANSFERRING, P.FREEZING, *DOWN),
    (P.TRANSFERRING, RanksCompared): row(on_loss.on_compared_in_repair, P.TRANSFERRING, *DOWN),
    (P.TRANSFERRING, RankExited): row(on_loss.on_exit_in_repair, *ANSWERS),
    (P.TRANSFERRING, StateSent): row(repair.on_state_sent, P.TRANSFERRING, P.RESUMING, *DOWN),
    (P.TRANSFERRING, RankRepaired): row(repair.on_repaired, P.TRANSFERRING, P.RESUMING, *DOWN),
    (P.TRANSFERRING, MismatchFound): row(on_hang.on_mismatch, P.FREEZING, *DOWN),
    (P.TRANSFERRING, NodeLost): row(on_loss.on_node_lost, P.TRANSFERRING, *ANSWERS),
    (P.TRANSFERRING, DowngradeAsked): row(on_request.on_downgrade_asked, P.TRANSFERRING, P.FREEZING),
    **ignored(P.TRANSFERRING, "reported twice: its phase is over", RankFrozen, RankReplayed),
    **ignored(P.TRANSFERRING, "not asked for yet", RankRebuilt, RankReissued),
    #
    **in_repair(P.RESUMING),
    (P.RESUMING, RankStarted): row(on_leave.unless_away(repair.on_started), P.RESUMING),
    (P.RESUMING, SpawnFailed): row(on_leave.on_spawn_failed, P.RESUMING, P.FREEZING, *DOWN),
    (P.RESUMING, RankUnprotected): row(on_request.unless_ending(on_loss.on_unprotected_in_repair), *DOWN),
    (P.RESUMING, RanksCompared): row(on_loss.on_compared, P.RESUMING),
    (P.RESUMING, RankExited): row(
        on_request.unless_ending(on_loss.on_exit_in_repair), P.RESUMING, P.RUNNING, P.DONE, *ANSWERS
    ),
    (P.RESUMING, RankRebuilt): row(repair.on_rebuilt, P.RESUMING, P.RUNNING, P.FAILED),
    (P.RESUMING, RankReissued): row(repair.on_reissued, P.RESUMING, P.RUNNING, P.FAILED),
    (P.RESUMING, ConnectionBroken): row(on_request.unless_ending(on_hang.on_connection_broken_again), *ANSWERS),
    (P.RESUMING, MismatchFound): row(on_request.unless_ending(on_hang.on_mismatch), *ANSWERS),
    (P.RESUMING, RankFaulted): row(on_request.unless_ending(on_loss.on_faulted), *ANSWERS),
    (P.RESUMING, RankHung): row(on_request.unless_ending(on_hang.on_unfit), P.RESUMING, *ANSWERS),
    (P.RESUMING, NodeLost): row(on_request.unless_ending(on_loss.on_node_lost), P.RESUMING, *ANSWERS),
    (P.RESUMING, RankDiverged): row(on_request.unless_ending(on_hang.on_unfit), *ANSWERS),
    **ignored(P.RESUMING, "the replacements are there", DowngradeAsked),
    (P.RESUMING, StopAsked): row(on_request.unless_ending(on_loss.on_stop), *END),
    **ignored(P.RESUMING, "reported twice: its phase is over", RankFrozen, RankReplayed, StateSent, RankRepaired),
    #
    **noted(P.PERSISTING),
    **begun_anew(P.PERSISTING),
    (P.PERSISTING, RankFrozen): row(on_request.on_frozen_to_persist, P.PERSISTING, P.RESUMING, *OVER),
    (P.PERSISTING, StatePersisted): row(on_request.on_persisted, P.RESUMING, *OVER),
    (P.PERSISTING, RankStarted): row(on_leave.unless_away(on_loss.on_started_in_vain), P.PERSISTING),
    (P.PERSISTING, SpawnFailed): row(on_leave.forget_spawn, P.PERSISTING),
    (P.PERSISTING, RankUnprotected): row(on_loss.on_unprotected, P.PERSISTING),
    (P.PERSISTING, RanksCompared): row(on_loss.on_compared, P.PERSISTING),
    (P.PERSISTING, RankExited): row(
        on_request.unless_resizing(on_request.on_exit_to_persist), P.PERSISTING, P.RESUMING, P.DONE, *ANSWERS
    ),
    (P.PERSISTING, RankFaulted): row(
        on_request.unless_resizing(on_request.on_faulted_to_persist), P.PERSISTING, P.RESUMING, *ANSWERS
    ),
    (P.PERSISTING, NodeLost): row(
        on_request.unless_resizing(on_request.on_node_lost_to_persist), P.PERSISTING, P.RESUMING, *ANSWERS
    ),
    (P.PERSISTING, MismatchFound): row(on_request.on_mismatch_to_persist, P.RESUMING, P.FREEZING, *OVER),
    (P.PERSISTING, DeadlinePassed): row(
        on_request.unless_resizing(on_request.on_deadline_to_persist), P.PERSISTING, P.RESUMING, *ANSWERS
    ),
    (P.PERSISTING, SupervisorRenewed): row(on_hang.on_renewed, P.PERSISTING),
    (P.PERSISTING, StopAsked): row(on_request.on_stop_while_persisting, P.PERSISTING),
    **ignored(P.PERSISTING, "one is being written", CheckpointAsked, ResizeAsked),
    **ignored(P.PERSISTING, "it comes first, and whoever asked is informed", ReplacementAsked, UpgradeAsked),
    **ignored(P.PERSISTING, "nobody waits for replacements", DowngradeAsked),
    **ignored(P.PERSISTING, "all ranks have been started", ResumeAsked),
    **ignored(P.PERSISTING, "it waits for the next step that is verified", StepDiffers),
    **ignored(P.PERSISTING, "who does not quiesce meets the deadline", RankHung, RankDiverged, ConnectionBroken),
    **ignored(P.PERSISTING, "the repair was abandoned", RankReplayed, StateSent, RankRepaired),
    **ignored(P.PERSISTING, "the repair was abandoned", RankRebuilt, RankReissued),
    #
    **begun_anew(P.DRAINING),
    (P.DRAINING, RankStarted): row(on_leave.unless_away(on_loss.on_started_in_vain), P.DRAINING),
    (P.DRAINING, SpawnFailed): row(on_leave.forget_spawn, P.DRAINING),
    (P.DRAINING, RankExited): row(on_loss.on_exit_while_draining, P.DRAINING, P.DONE, *DOWN),
    (P.DRAINING, RankFaulted): row(on_loss.on_faulted_while_draining, P.DRAINING, *DOWN),
    (P.DRAINING, NodeLost): row(on_loss.on_node_lost_while_draining, P.DRAINING, P.DONE, *DOWN),
    (P.DRAINING, DeadlinePassed): row(on_leave.on_drain_deadline, P.DRAINING, *DOWN),
    (P.DRAINING, RankFrozen): row(on_leave.on_frozen_while_draining, P.DRAINING, *DOWN),
    (P.DRAINING, SupervisorRenewed): row(on_hang.on_renewed, P.DRAINING),
    (P.DRAINING, StopAsked): row(on_loss.on_stop, *END),
    **ignored(
        P.DRAINING,
        "nothing can be repaired or written any more",
        SnapshotTaken,
        ResumeAsked,
        CheckpointAsked,
        ResizeAsked,
        StatePersisted,
        ReplacementAsked,
        *OF_SIZE,
    ),
    (P.DRAINING, ConnectionBroken): row(on_leave.on_broken_while_draining, *DOWN),
    **ignored(P.DRAINING, "who cannot finish meets the deadline", RankHung, RankDiverged, StepDiffers),
    **ignored(P.DRAINING, "nothing will be repaired any more", RankProtected, RankUnprotected, MismatchFound),
    **ignored(P.DRAINING, "nothing will be repaired any more", *OF_MEMBERSHIP, RanksCompared, RankHindered),
    **ignored(P.DRAINING, "the repair was abandoned", RankReplayed, StateSent, RankRepaired),
    **ignored(P.DRAINING, "the repair was abandoned", RankRebuilt, RankReissued),
    #
    **begun_anew(P.RESTARTING),
    (P.RESTARTING, StopAsked): row(on_loss.on_stop, P.FAILED),
    (P.RESTARTING, SupervisorRenewed): row(on_hang.on_renewed, P.RESTARTING),
    **ignored(P.RESTARTING, "a consequence of a group that has ended", *OF_CHECKPOINTS),
    **ignored(P.RESTARTING, "the agent is ending this process", RankFaulted, RankHung, RankDiverged, ConnectionBroken),
    **ignored(P.RESTARTING, "all ranks are replaced anyway", NodeLost, StepDiffers),
    **ignored(P.RESTARTING, "the agent is ending this process", RankStarted, SpawnFailed, RankExited, RankProtected),
    **ignored(P.RESTARTING, "the agent is ending this process", RankUnprotected, RankFrozen, RankReplayed, StateSent),
    **ignored(P.RESTARTING, "the agent is ending this process", RanksCompared, RankHindered),
    **ignored(P.RESTARTING, "the agent is ending this process", RankRepaired, RankRebuilt, RankReissued, MismatchFound),
    **ignored(P.RESTARTING, "the repair was abandoned", DeadlinePassed),
    **ignored(P.RESTARTING, "all ranks are replaced anyway", ReplacementAsked, *OF_SIZE, *OF_MEMBERSHIP),
    #
}
for _, _event_type in [key for key in TRANSITIONS if key[0] is P.RUNNING]:
    TRANSITIONS |= ignored(P.DONE, "the job is over", _event_type) | ignored(P.FAILED, "the job is over", _event_type)
TRANSITIONS |= {
    (P.DONE, SupervisorRenewed): row(on_hang.on_renewed, P.DONE),
    (P.FAILED, SupervisorRenewed): row(on_hang.on_renewed, P.FAILED),
}

# A union that is made for each event takes longer than the check.
_OF_ANY_JOB = (DeadlinePassed, SnapshotTaken, SupervisorRenewed)
_OF_A_GENERATION = (RepairEvent, DeadlinePassed, ConnectionBroken, StatePersisted)
_OF_A_PROCESS = (RankExited, RankFaulted, RankHung, RankDiverged, StepDiffers)


def advance(job: Job, event: Event) -> Result:
    """Answer one event.

    returns   the job afterwards, and the orders to carry out; the very same job and no orders if nothing changes

    Raises MachineError on a bug of ours: a pair without a row, a phase that its row does not allow, a rank that is not
    there, a start of a process that the rank does not need.
    """
    if isinstance(event, RankEvent) and not 0 <= event.rank < len(job.members):
        raise MachineError(f"the job has no rank {event.rank}", job, event)
    domain = alone.domain_of(job, event)
    if domain is not None:
        return domain.take_back(*advance(domain.own, domain.event))
    if is_echo(job, event):
        return job, ()
    transition = TRANSITIONS.get((job.phase, type(event)))
    if transition is None:
        raise MissingTransition(f"no row for {type(event).__name__} in {job.phase}", job, event)
    after, actions = transition.handler(job, event)
    if after.phase not in transition.leads_to:
        raise ForbiddenTransition(f"{type(event).__name__} led from {job.phase} to {after.phase}", job, event)
    if job.kept:
        after, actions = on_request.keep_to_plan(job, event, (after, actions), transition.handler)
    if not actions and vars(after) == vars(job):  # as ==, which would copy all fields first
        return job, ()
    after, actions = alone.give_up_repairs(job, after, actions)
    return changed(after, story=(*after.story, event)[-STORY_LENGTH:]), actions


def is_echo(job: Job, event: Event) -> bool:
    """The event is about something that is over: another generation, or a process that the rank no longer has."""
    if isinstance(event, _OF_ANY_JOB) and event.rank is not None:
        return True  # of a rank that was repaired alone, or is not alone any more
    if isinstance(event, _OF_A_GENERATION):
        return event.generation != job.generation
    if isinstance(event, _OF_A_PROCESS):
        return event.pid != job.members[event.rank].pid
    return False
