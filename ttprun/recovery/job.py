"""The machine's state: settings, ranks, phase, open incident; and how another agent takes it over. Frozen data.

An incident is one fault and all that follows from it. The progress of a repair is in what each member has answered so
far (`members`). Read `JobPhase` and `Job` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.meeting import GroupMembership, Known, Legacy
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.recovery.job_events import Saved, UpgradeAsked
from ttprun.recovery.members import Member, Members, RankState, changed
from ttprun.recovery.replicas import UNKNOWN, Replicas

Rung = Literal["reconnect", "rerun", "replace", "rewind", "resize", "restart", "fail"]
Outcome = Literal["open", "recovered", "restarted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is known about an incident so far. Durations of phases that it has not reached are None.

    Those from `freeze_s` to `reissue_s` are of the last attempt; `spawn_s` is the slowest start of all attempts.

    id            1 for the job's first incident; 0: not an incident, a new launch resumes from a checkpoint ("resume")
    kind          of the first fault: "signal 9", "exit 3", "exception", "hang", "connection", "mismatch", a fault of a
                  device; "planned": healthy ranks are to be replaced; "upgrade": ranks that were away are called
                  back; "checkpoint": resuming from one has failed; "resume": see `id`
    ranks         lost ranks, in the order of their loss, each once; or the rank that found a mismatch
    rung          the way out that is tried: reconnect, run the script again in the same processes, replace the ranks,
                  rewind to a snapshot, resize to fewer ranks (or to all of them again), restart the group, or fail
    outcome       "open" until it has ended
    reason        the faults, a sentence; after a fallback, why it was taken and then the faults
    phase         phase of the job when this was written
    generation    of the job when this was written
    attempt       1 .. max_attempts
    boundary      of the survivors; None before they have agreed
    steps_lost    optimizer steps that all must run again; None if unknown
    opened_at_s   when the agent saw the first fault
    detect_s      from the first death until the agent saw it
    freeze_s      until the last survivor was quiesced
    spawn_s       from the request for a process to its start, also while survivors are quiesced (`freeze_s`)
    had_standby  all new processes came from standbys; None: none was needed, or it is not known
    replay_s      from there, or from the last replacement's start if that was later, until the last one had replayed
    transfer_s    until the last replacement had its state
    rebuild_s     until all ranks were connected
    reissue_s     from there until all journals were issued again
    total_s       from the first death to the end of the incident
    """

    id: int
    kind: str
    ranks: tuple[int, ...]
    rung: Rung
    outcome: Outcome
    reason: Reason
    phase: str
    generation: int
    opened_at_s: float
    attempt: int = 1
    boundary: int | None = None
    steps_lost: int | None = None
    detect_s: float | None = None
    freeze_s: float | None = None
    spawn_s: float | None = None
    had_standby: bool | None = None
    replay_s: float | None = None
    transfer_s: float | None = None
    rebuild_s: float | None = None
    reissue_s: float | None = None
    total_s: float | None = None


NOBODY = -1  # the rank of a fault that belongs to no rank
RUNGS = frozenset({"reconnect", "rerun", "replace", "rewind", "resize", "restart", "persist"})
WINDOW_S = 3600.0


class JobPhase(StrEnum):
    """The phase of the job."""

    RUNNING = "RUNNING"  # ranks train, or have finished
    FREEZING = "FREEZING"  # survivors quiesce, replacements start
    REPLAYING = "REPLAYING"  # replacements run the script up to the boundary
    TRANSFERRING = "TRANSFERRING"  # the source sends its state, or all load that of a snapshot
    RESUMING = "RESUMING"  # all connect, and issue their journals
    PERSISTING = "PERSISTING"  # living ranks quiesce and write a checkpoint
    DRAINING = "DRAINING"  # no repair is possible; ranks that can finish may do so
    RESTARTING = "RESTARTING"  # the agent restarts the whole group
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimits:
    """How long each phase of a recovery may take, in seconds; ranks that have not answered by then count as hung."""

    freeze_s: float = 60.0
    replay_s: float = 600.0
    transfer_s: float = 300.0
    resume_s: float = 300.0  # at boundary 0 replay_s more: the replacement must start first
    drain_s: float = 300.0
    halt_s: float = 10.0  # to quiesce for a checkpoint
    persist_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the user and the agent.

    world_size            number of ranks, >= 1
    is_alone              the one rank of this job that is not away is independent of others
    rungs                 ways of recovery that may be used
    max_attempts          attempts per incident; survivors that die while all freeze cost none
    max_same_faults       times that the same fault of one rank at one boundary is repaired
    exception_retries     times that a rank is run again after the same error of its script in the same step
    max_reconnects        times that connections that break at one boundary are made again
    max_incidents_per_hour  incidents of one kind within WINDOW_S that are repaired; None: any number
    max_restarts          whole-group restarts; None: any number
    max_rewinds           rewinds to one snapshot for the same kind of fault at the same boundary
    saves_before_restart  a restarted script loads what living ranks save: a framework's own checkpoint
    begins_anew           a new launch that cannot resume from any checkpoint runs the script from its top; False: ends
    same_command_goes_on  the next launch of the same command finds what this job saves
    are_replicas_declared  a framework declares the replicas, and finds the sources itself: nothing is compared
    is_elastic            the job trains on as many nodes as there are: it resumes its saved state on others
    """

    world_size: int
    is_alone: bool = False
    rungs: frozenset[str] = RUNGS
    max_attempts: int = 3
    max_same_faults: int = 3
    exception_retries: int = 2
    max_reconnects: int = 1
    max_rewinds: int = 3
    max_incidents_per_hour: int | None = None
    max_restarts: int | None = None
    saves_before_restart: bool = False
    begins_anew: bool = True
    same_command_goes_on: bool = True
    are_replicas_declared: bool = False
    is_elastic: bool = False
    limits: PhaseLimits = PhaseLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultIdentity:
    """The fault that opened an incident, to recognize it if it comes back: rank (or NOBODY), kind and boundary.

    crashed_at   what crashed in native code, and in which line of the script; "": no crash, or the line is not known
    """

    rank: int
    kind: str
    boundary: int
    crashed_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """When an incident was opened, and with what kind of fault."""

    at_s: float
    kind: str


class FaultsTold(NamedTuple):
    """Faults of an incident in words: those between the first and the newest are in the event log.

    times   that the newest (if there is none, the first) has come in a row
    """

    first: str
    newest: str = ""
    times: int = 1

    def __str__(self) -> str:
        said = f"{self.first}, then {self.newest}" if self.newest else self.first
        return f"{said} ({self.times} times)" if self.times > 1 else said

    def and_then(self, fault: str) -> FaultsTold:
        """With one more."""
        if fault == (self.newest or self.first):
            return self._replace(times=self.times + 1)
        return FaultsTold(self.first, fault)


NOTHING_TOLD = FaultsTold("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the job ends, or the group is restarted, once its state has been written.

    reason          for the operator
    has_progress    False: the same fault comes back again and again
    is_fault        False: the user or the scheduler ends it
    rung            of the open incident, "" to leave it
    is_restart      the group is restarted, and runs the script from its top
    goes_on         the job resumes from the newest saved state, if there is one
    is_replayable   False: a replay of the script has differed, so nothing should resume from the saved state
    is_resize       nothing ends but the present processes: nodes join or leave
    why             if it resumes: the reason, without why a restart is impossible
    """

    reason: Reason
    has_progress: bool = True
    is_fault: bool = True
    rung: str = ""
    is_restart: bool = False
    goes_on: bool = False
    is_replayable: bool = True
    is_resize: bool = False
    why: Reason = Reason()


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the decisions depend on. Made by `new_job`, changed by `machine.advance` alone.

    generation           of the communicators; in a recovery, that of the new ones
    members              one per rank, in order
    alone                jobs of ranks that train without a process group, see `alone.py`
    phase_since_s        when the phase, or the current attempt in it, began
    incident             the open one, or None
    cause                its faults, a sentence
    told, since          what the cause, and the incident's reason, have been put together of
    incident_count       incidents so far, with the open one
    unprotected_reason   why no rank can be replaced any more; none if they can
    replicas             which ranks hold the same, as far as they have been compared
    faults               that opened incidents at the newest boundary, to recognize one that comes back
    openings             of incidents within WINDOW_S
    rewinds              the causes of rewinds to the current snapshot so far
    in_memory            what outlives the ranks' processes there: the newest snapshot, of a rank alone also its own
                         state; the newest first
    saved                checkpoints on disk from which all can resume, in the order of preference
    back_to              the stored state from which all resume; boundary 0: from the script's top; None: no rewind
    is_resumed           the current rewind is that of a new launch
    is_contradicted      in the open incident a replay has differed from the run: what others come to must be compared
    is_growing           nodes have come, and their ranks have not trained yet
    went_back_to         boundary of the saved state from which this job last resumed; None: none yet
    leaving              healthy ranks that are replaced once all stand still
    leaves_node          they leave with their node
    keeps_old            their processes are kept until the new ones have caught up
    kept                 the members that these processes were
    stood_at             boundary at which the survivors quiesced to write their state
    persists_at          boundary at which a checkpoint is being written; None: not writing yet
    ending               what ends the job, or its processes, after its state is written; None: they resume
    restarts             of the whole group so far
    story                newest events that changed something, for errors of our own
    """

    settings: Settings
    members: Members
    alone: Mapping[int, Job] = field(default_factory=dict)
    phase: JobPhase = JobPhase.RUNNING
    generation: int = 0
    phase_since_s: float = 0.0
    incident: Incident | None = None
    cause: str = ""
    told: FaultsTold = NOTHING_TOLD
    since: FaultsTold = NOTHING_TOLD
    incident_count: int = 0
    unprotected_reason: Reason = Reason()
    replicas: Replicas = UNKNOWN
    faults: tuple[FaultIdentity, ...] = ()
    openings: tuple[Opening, ...] = ()
    rewinds: tuple[FaultIdentity, ...] = ()
    in_memory: tuple[Saved, ...] = ()
    saved: tuple[Saved, ...] = ()
    back_to: Saved | None = None
    is_resumed: bool = False
    is_contradicted: bool = False
    is_growing: bool = False
    went_back_to: int | None = None
    leaving: tuple[int, ...] = ()
    leaves_node: bool = False
    keeps_old: bool = False
    kept: tuple[Member, ...] = ()
    stood_at: int | None = None
    persists_at: int | None = None
    ending: Ending | None = None
    restarts: int = 0
    story: tuple[Event, ...] = ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks that are full members of the group."""
        return self.ranks_that_are(RankState.LIVE)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose replacement has not caught up yet."""
        return self.ranks_that_are(RankState.LOST)

    @property
    def finished(self) -> tuple[int, ...]:
        """Ranks whose script has reached its end."""
        return self.ranks_that_are(RankState.FINISHED)

    @property
    def away(self) -> tuple[int, ...]:
        """Ranks without which the others train."""
        return self.ranks_that_are(RankState.AWAY)

    @property
    def are_alone(self) -> bool:
        """Whether some rank takes its steps without a process group, and no rank has one now."""
        return self.count("trains alone") > 0 and not self.count("has joined")

    @property
    def is_upgrading(self) -> bool:
        """Whether the ranks that were away are being started again."""
        is_upgrade = self.incident is not None and self.incident.kind == UpgradeAsked.kind
        return is_upgrade and not self.count("away")

    def count(self, what: str) -> int:
        """How many ranks this holds of; `what` of `members.COUNTED`."""
        return self.members.count(what)

    def ranks_that_are(self, life: RankState) -> tuple[int, ...]:
        """Ranks of one kind, in order."""
        if not self.count(life.value):
            return ()
        return tuple(member.rank for member in self.members if member.life is life)

    @property
    def hindrance(self) -> Reason:
        """Why no replay can reach the current boundary, by the lowest rank that reports it; none if one can."""
        if not self.count("hindered"):
            return Reason()
        return next(member.hindrance for member in self.members if member.hindrance)

    @property
    def snapshot(self) -> int | None:
        """The boundary of the newest complete snapshot; None if there is none."""
        return next((saved.boundary for saved in self.in_memory if not saved.is_own), None)

    @property
    def replacements(self) -> tuple[Member, ...]:
        """Members for the lost ranks, with or without a process yet."""
        return tuple(self.members[rank] for rank in self.lost)

    @property
    def target(self) -> int | None:
        """The boundary at which all will resume: that of the stored state, or the survivors'; None: unknown."""
        if self.back_to is not None:
            return self.back_to.boundary
        return None if self.source is None else self.source.boundary

    @property
    def source(self) -> RankFrozen | None:
        """The answer of the lowest quiesced survivor, at whose boundary all resume."""
        if not self.count("quiesced"):
            return None
        return next(member.frozen for member in self.members if member.frozen is not None)

    @property
    def quiesced(self) -> tuple[int, ...]:
        """Survivors that are quiesced."""
        return tuple(member.rank for member in self.members if member.frozen is not None)

    def with_member(self, rank: int, **changes: Any) -> Job:
        """The job with one member changed."""
        return self.with_members(changed(self.members[rank], **changes))

    def with_members(self, *members: Member) -> Job:
        """The job with some members exchanged."""
        return changed(self, members=self.members.with_changed(members))

    def with_incident(self, **changes: Any) -> Job:
        """The job with its open incident changed, if there is one."""
        return self if self.incident is None else replace(self, incident=replace(self.incident, **changes))


def new_job(settings: Settings) -> Job:
    """A job whose ranks are about to start: a RankStarted is expected for each. Raises ValueError without ranks."""
    if settings.world_size < 1:
        raise ValueError(f"world_size is {settings.world_size}; a job has at least one rank")
    return Job(settings=settings, members=fresh_members(settings))


def fresh_members(settings: Settings) -> Members:
    """Members without processes."""
    return Members.of(Member(rank=rank) for rank in range(settings.world_size))


def known_of(job: Job, why_no_checkpoints: str) -> Known:
    """What another leader would have to know of a job, beside what its ranks report."""
    replicas = job.replicas
    return Known(
        incidents=job.incident_count,
        restarts=job.restarts,
        unprotected=job.unprotected_reason,
        compared_at=replicas.compared_at,
        differing=dict(replicas.differing),
        shards=dict(replicas.shards),
        names=dict(replicas.names),
        mirrored=tuple(sorted(replicas.mirrored)),
        has_collective_steps=replicas.has_collective_steps,
        why_no_checkpoints=why_no_checkpoints,
        saved={checkpoint.place: checkpoint.boundary for checkpoint in job.saved},
    )


def succeed(settings: Settings, legacies: Iterable[Legacy], generation: int, known: Known) -> Job:
    """The running job for another agent, after the leader is lost; what its ranks have lost is yet to be reported.

    An incident that was open is not continued: it is repaired in a new generation.

    legacies     one for each rank, in any order
    generation   the newest that any agent knows of

    Raises ValueError if a rank is missing.
    """
    by_rank = {legacy.rank: legacy for legacy in legacies}
    missing = [rank for rank in range(settings.world_size) if rank not in by_rank]
    if missing:
        raise ValueError(f"nothing is known of rank {missing[0]}")
    reasons = (
        legacy.unprotected.within(f"rank {legacy.rank} is not protected ({legacy.unprotected})")
        for legacy in by_rank.values()
        if legacy.unprotected
    )
    replicas = Replicas(
        compared_at=known.compared_at,
        differing=known.differing,
        shards=known.shards,
        names=known.names,
        mirrored=frozenset(known.mirrored),
        has_collective_steps=known.has_collective_steps,
    )
    return Job(
        settings=settings,
        members=Members.of(
            Member(
                rank=rank,
                pid=None if by_rank[rank].is_finished else by_rank[rank].pid,
                life=RankState.FINISHED if by_rank[rank].is_finished else RankState.LIVE,
                is_protected=by_rank[rank].is_protected,
                membership=by_rank[rank].membership,
                has_joined=by_rank[rank].membership is GroupMembership.JOINED,
                hindrance=by_rank[rank].hindrance,
            )
            for rank in range(settings.world_size)
        ),
        generation=generation,
        incident_count=known.incidents,
        restarts=known.restarts,
        unprotected_reason=known.unprotected or next(reasons, Reason()),
        replicas=replicas,
        saved=tuple(Saved(boundary, place) for place, boundary in known.saved.items()),
    )
