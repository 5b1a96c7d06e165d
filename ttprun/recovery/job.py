"""The job as the machine sees it: settings, ranks, phase, open incident. Frozen data, no decisions.

A repair keeps no record of its own: what has been done of it is what each `Member` has answered so far.
Read `Phase`, `Member` and `Job` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

from ttprun.recovery.events import ElasticDeclared, Event, RankFrozen, Saved, UpgradeAsked
from ttprun.recovery.incident import Incident
from ttprun.recovery.replicas import UNKNOWN, Replicas

NOBODY = -1  # the rank of a fault that is no rank's own
RUNGS = frozenset({"reconnect", "rerun", "replace", "rewind", "resize", "restart", "persist"})
WINDOW_S = 3600.0


class Phase(StrEnum):
    """What is going on in the job."""

    RUNNING = "RUNNING"  # ranks train, or have finished
    FREEZING = "FREEZING"  # survivors come to a stand, replacements start
    REPLAYING = "REPLAYING"  # replacements run the script up to the boundary
    TRANSFERRING = "TRANSFERRING"  # the source sends its state, or all load that of a snapshot
    RESUMING = "RESUMING"  # all connect, and issue their journals
    PERSISTING = "PERSISTING"  # living ranks quiesce and write a checkpoint
    DRAINING = "DRAINING"  # no repair is possible; ranks that can finish may do so
    RESTARTING = "RESTARTING"  # the agent restarts the whole group
    DONE = "DONE"
    FAILED = "FAILED"


class Ties(Enum):
    """What a rank has to do with the others."""

    UNKNOWN = "unknown"  # it has neither taken a step nor made a process group
    JOINED = "joined"  # it has made a process group with others
    ALONE = "alone"  # it takes its steps without one


class Life(Enum):
    """What a rank is worth."""

    LIVE = "live"  # a full member of the group: it may be a survivor and a source
    LOST = "lost"  # a fault ended its process or its script; whoever takes its place has not caught up yet
    FINISHED = "finished"  # its script has come to the end
    AWAY = "away"  # it has no process, and the others train on without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each phase of a recovery may take, in seconds; who has not answered by then is taken for hung."""

    freeze_s: float = 60.0
    replay_s: float = 600.0
    transfer_s: float = 300.0
    resume_s: float = 300.0  # at boundary 0 replay_s more: the replacement must start up first
    drain_s: float = 300.0
    halt_s: float = 10.0  # to quiesce for a checkpoint, before who does not is abandoned
    persist_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user and the agent have decided beforehand.

    world_size           number of ranks, >= 1
    is_alone             the one rank of this job that is not away needs no other one
    rungs                ways of recovery that may be used; the others are passed over
    max_attempts         attempts per incident; survivors that die while all freeze cost none
    max_same_faults      times that the same fault of one rank at one boundary is answered by a replacement
    max_reconnects       times that connections which break at one boundary are built again
    max_incidents_per_hour  incidents of one kind within WINDOW_S that are answered; None: any number
    max_restarts         whole-group restarts; None: any number
    max_rewinds          times that all go back to one snapshot for the same kind of fault at the same boundary
    saves_before_restart  what living ranks save is what a restarted script begins with: a framework's own checkpoint
    begins_anew          a new launch that can go on from no checkpoint runs the script from its top; False: it ends
    same_command_goes_on  what this job saves is found by the next launch of the same command
    are_replicas_declared  a framework says who holds the same, and finds the sources itself: nothing is compared
    """

    world_size: int
    is_alone: bool = False
    rungs: frozenset[str] = RUNGS
    max_attempts: int = 3
    max_same_faults: int = 3
    max_reconnects: int = 1
    max_rewinds: int = 3
    max_incidents_per_hour: int | None = None
    max_restarts: int | None = None
    saves_before_restart: bool = False
    begins_anew: bool = True
    same_command_goes_on: bool = True
    are_replicas_declared: bool = False
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank: its process, and what it has answered in the present attempt.

    pid                 present process; None if there is none, or if it has been killed by us
    is_rerun            lost, but the process has outlived the fault: it runs the script again, and takes its own place
    is_protected        its hooks have said hello
    ties                what it has to do with the others now
    has_joined          it has had a process group with others
    hindrance           why the boundary at which it stands cannot be replayed, "" if it can; of a lost rank, where it
                        stood last
    spawn_asked_at_s    when a process was asked for that has not started yet
    has_orders          a replacement that has been told where to go; a new attempt needs a new process
    elastic             what it has declared, if it can train on in a smaller group
    frozen              answer to Freeze
    sent_digest         digest of StateSent; the source only
    repaired_digest     digest of RankRepaired; replacements only

    A rank that is rerun is a replacement like any other, but for its process.
    """

    rank: int
    pid: int | None = None
    life: Life = Life.LIVE
    is_rerun: bool = False
    is_protected: bool = False
    ties: Ties = Ties.UNKNOWN
    has_joined: bool = False
    hindrance: str = ""
    spawn_asked_at_s: float | None = None
    has_orders: bool = False
    elastic: ElasticDeclared | None = None
    frozen: RankFrozen | None = None
    has_replayed: bool = False
    sent_digest: str | None = None
    repaired_digest: str | None = None
    has_rebuilt: bool = False
    has_reissued: bool = False

    @property
    def needs_process(self) -> bool:
        """Lost, and its place must be taken by a new process: one that has had orders may stand anywhere."""
        return self.life is Life.LOST and (self.pid is None or self.has_orders)

    def as_lost(self, at_s: float) -> Member:
        """The place of a rank whose process was asked for at that time."""
        place = Member(rank=self.rank, life=Life.LOST, spawn_asked_at_s=at_s)
        return replace(place, ties=self.ties, has_joined=self.has_joined)

    def with_answers_forgotten(self) -> Member:
        """The same process at the beginning of another attempt."""
        return Member(
            rank=self.rank,
            pid=self.pid,
            life=self.life,
            is_rerun=self.is_rerun,
            is_protected=self.is_protected,
            ties=self.ties,
            has_joined=self.has_joined,
            hindrance=self.hindrance,
            spawn_asked_at_s=self.spawn_asked_at_s,
            elastic=self.elastic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The fault that opened an incident, as far as it can come back: who (or NOBODY), how and where."""

    rank: int
    kind: str
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """When an incident was opened, and with what kind of fault."""

    at_s: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the job ends, or the group is restarted, once its state has been written.

    reason          for the operator
    has_progress    False: the same fault comes back again and again
    is_fault        False: the user or the scheduler has asked for it
    rung            of the open incident, "" to leave it
    is_restart      the job goes on with new ranks, which run the script from its top
    goes_on         the job goes on from the newest saved state, if there is one
    is_replayable   False: a replay of the script has come out otherwise, so nobody should go on from what is saved
    why             if it goes on: the reason without what keeps the job from a restart
    """

    reason: str
    has_progress: bool = True
    is_fault: bool = True
    rung: str = ""
    is_restart: bool = False
    goes_on: bool = False
    is_replayable: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that the decisions depend on. Made by `new_job`, changed by `machine.advance` alone.

    generation           of the communicators; in a recovery, that which is being made
    members              one per rank, in order
    alone                of ranks that train without a process group: each as a job of its own, see `alone.py`
    phase_since_s        when the phase, or the present attempt in it, began
    incident             the open one, None while all is well
    incident_count       incidents so far, with the open one
    unprotected_reason   why no rank can be replaced any more; "" if they can
    unreplicated_reason  why no rank can be repaired from another one; "" if they can
    replicas             which ranks hold the same, as far as they have been compared
    faults               that opened incidents at the newest boundary, to see one that comes back
    openings             of incidents within WINDOW_S
    rewinds              what has sent all ranks back to the present snapshot so far
    snapshot             boundary of the newest complete snapshot; None if there is none to go back to
    saved                checkpoints on disk to which all can go back, the one to try first first
    rewind_to            boundary to which all go back, or from which a new launch goes on; 0: all begin anew; None:
                         nobody goes back
    rewind_place         directory of the checkpoint that holds it; "": it is the snapshot, or there is none
    is_resumed           the present rewind is that of a new launch
    went_back_to         boundary of the saved state from which this job has gone on last; None: from none yet
    stood_at             boundary at which the survivors stood still to write what they hold
    persists_at          boundary at which a checkpoint is being written; None: nobody writes yet
    ending               what ends the job, or its ranks, once its state is written; None: they go on
    restarts             of the whole group so far
    story                newest events that changed something, for errors of our own
    """

    settings: Settings
    members: tuple[Member, ...]
    alone: Mapping[int, Job] = field(default_factory=dict)
    phase: Phase = Phase.RUNNING
    generation: int = 0
    phase_since_s: float = 0.0
    incident: Incident | None = None
    incident_count: int = 0
    unprotected_reason: str = ""
    unreplicated_reason: str = ""
    replicas: Replicas = UNKNOWN
    faults: tuple[Fault, ...] = ()
    openings: tuple[Opening, ...] = ()
    rewinds: tuple[Fault, ...] = ()
    snapshot: int | None = None
    saved: tuple[Saved, ...] = ()
    rewind_to: int | None = None
    rewind_place: str = ""
    is_resumed: bool = False
    went_back_to: int | None = None
    stood_at: int | None = None
    persists_at: int | None = None
    ending: Ending | None = None
    restarts: int = 0
    story: tuple[Event, ...] = ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks that are full members of the group."""
        return self.ranks_that_are(Life.LIVE)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose place a whole process has not taken yet."""
        return self.ranks_that_are(Life.LOST)

    @property
    def finished(self) -> tuple[int, ...]:
        """Ranks whose script has come to its end."""
        return self.ranks_that_are(Life.FINISHED)

    @property
    def away(self) -> tuple[int, ...]:
        """Ranks without which the others train on."""
        return self.ranks_that_are(Life.AWAY)

    @property
    def are_alone(self) -> bool:
        """Some rank takes its steps without a process group, and no rank has one now: each is on its own."""
        ties = [member.ties for member in self.members]
        return Ties.ALONE in ties and Ties.JOINED not in ties

    @property
    def is_upgrading(self) -> bool:
        """The ranks that were away are on their way back."""
        return self.incident is not None and self.incident.kind == UpgradeAsked.kind and not self.away

    def ranks_that_are(self, life: Life) -> tuple[int, ...]:
        """Ranks of one kind, in order."""
        return tuple(member.rank for member in self.members if member.life is life)

    @property
    def hindrance(self) -> str:
        """Why no replay can come to where the ranks stand, as the first rank to say so puts it; "" if one can."""
        return next((member.hindrance for member in self.members if member.hindrance), "")

    @property
    def replacements(self) -> tuple[Member, ...]:
        """Members for the lost ranks, with or without a process yet."""
        return tuple(member for member in self.members if member.life is Life.LOST)

    @property
    def target(self) -> int | None:
        """The boundary at which all will go on: that of the snapshot, or where the survivors stand; None: not known."""
        if self.rewind_to is not None:
            return self.rewind_to
        return None if self.source is None else self.source.boundary

    @property
    def source(self) -> RankFrozen | None:
        """Answer of the lowest survivor that stands still: its boundary is the one to resume from."""
        return next((member.frozen for member in self.members if member.frozen is not None), None)

    @property
    def standing(self) -> tuple[int, ...]:
        """Survivors that are quiesced."""
        return tuple(member.rank for member in self.members if member.frozen is not None)

    def source_of(self, rank: int) -> int | None:
        """The lowest survivor that stands still and holds all that a lost rank held; None: nobody does."""
        if self.settings.are_replicas_declared:
            return next(iter(self.standing), None)
        if self.replicas.why_no_source(rank, self.standing):
            return None
        return self.replicas.peers(rank, self.standing)[0]

    def alike(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """These ranks, those that hold the same together."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            found.setdefault(self.replicas.of(rank), []).append(rank)
        return [tuple(members) for members in found.values()]

    def with_member(self, rank: int, **changes: Any) -> Job:
        """The same job with one member changed."""
        return self.with_members(replace(self.members[rank], **changes))

    def with_members(self, *changed: Member) -> Job:
        """The same job with some members exchanged."""
        by_rank = {member.rank: member for member in (*self.members, *changed)}
        return replace(self, members=tuple(by_rank[member.rank] for member in self.members))

    def with_incident(self, **changes: Any) -> Job:
        """The same job with its open incident changed, if there is one."""
        return self if self.incident is None else replace(self, incident=replace(self.incident, **changes))


def new_job(settings: Settings) -> Job:
    """A job whose ranks are about to be started: a RankStarted for each is expected."""
    if settings.world_size < 1:
        raise ValueError(f"world_size is {settings.world_size}; a job has at least one rank")
    return Job(settings=settings, members=fresh_members(settings))


def fresh_members(settings: Settings) -> tuple[Member, ...]:
    """Members none of which has a process yet."""
    return tuple(Member(rank=rank) for rank in range(settings.world_size))


def name_ranks(ranks: tuple[int, ...]) -> str:
    """ "rank 2", or "ranks 0, 3"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
