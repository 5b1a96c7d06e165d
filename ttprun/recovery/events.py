"""Events other than faults (`fault_events.py`): how ranks begin, what they report, what is requested. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ttprun.recovery.event import Event, RankEvent, RepairEvent
from ttprun.recovery.replicas import UNKNOWN, Replicas
from ttprun.recovery.shards import ReplicaGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted(RankEvent):
    """A process has been started for a rank, or a standby has been given it.

    pid   from now on the rank's present pid
    """

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed(RankEvent):
    """No process can be started for a rank: the machine has not what it takes.

    reason   what the system says
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProtected(RankEvent):
    """The rank's hooks have said hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnprotected(RankEvent):
    """From now on this rank cannot take part in a repair, so no rank of the job can be replaced.

    reason   what the hooks met, for the operator
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCompared(Event):
    """All ranks have reported digests of what they hold, and it is known who is a replica of whom.

    replicas   what is known now
    """

    replicas: Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrainsAlone(RankEvent):
    """The rank has come to an optimizer step, and has no process group in which there are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined(RankEvent):
    """The rank makes a process group with others, or has one when it goes live after a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHindered(RankEvent):
    """The current place of this rank in the script, or its state there, cannot be replayed.

    reason   why, for the operator; "" once that is over
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementAsked(Event):
    """Healthy ranks are to give their places to new processes.

    ranks    at least one, each once
    reason   who asked, and why
    """

    ranks: tuple[int, ...]
    reason: str

    kind: ClassVar[str] = "planned"

    @property
    def sentence(self) -> str:
        """What was asked, for an operator."""
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} had to be replaced as requested ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDeclared(RankEvent):
    """A rank can continue in a smaller group, and declares which ranks train the same parameters.

    replicas        groups over which its optimizers are spread; () if every rank holds all that the others hold
    data_parallel   the group over which the batches are spread; () if that is one of these
    """

    replicas: tuple[ReplicaGroup, ...] = ()
    data_parallel: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DowngradeAsked(Event):
    """The others are to train on without the ranks that are lost, and not to wait for replacements.

    reason   who asked, and why
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeAsked(Event):
    """The ranks that are away are to come back.

    reason   who asked, and why
    """

    reason: str

    kind: ClassVar[str] = "upgrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFrozen(RepairEvent):
    """A survivor is quiesced.

    boundary    optimizer steps that it has completed
    digest      of its replicated state; "" if it has none
    has_group   the script has made its process group
    is_at_end   its script has reached its end; its process stays for the others
    """

    boundary: int
    digest: str
    has_group: bool
    is_at_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplayed(RepairEvent):
    """A replacement has come to the boundary in replay and waits for tensors.

    boundary   where it stands
    """

    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSent(RepairEvent):
    """The source has sent the state to every replacement.

    digest   of what it has sent
    """

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRepaired(RepairEvent):
    """A replacement has loaded the state.

    digest     of what it has loaded
    boundary   of the checkpoint that all ranks have loaded, since no rank had the state; None: it came from the source
    """

    digest: str
    boundary: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRebuilt(RepairEvent):
    """A rank is connected in the new generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReissued(RepairEvent):
    """A survivor's journal is through; a replacement has issued as many collectives as the survivors had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFound(RepairEvent):
    """A check failed in a rank: its state must not be used.

    reason             which check, and the two values
    is_contradiction   False: too little is proved to join the others; all may resume from what is saved
    is_near            another replacement may get further: this one differs by rounding alone, which may not come
                       back, or it has found what the next one does otherwise
    """

    reason: str
    is_contradiction: bool = True
    is_near: bool = False

    kind: ClassVar[str] = "mismatch"

    @property
    def sentence(self) -> str:
        """For the operator."""
        if self.is_near:
            return f"rank {self.rank} is replaced once more: {self.reason}"
        return f"rank {self.rank} is {'refused' if self.is_contradiction else 'not proved'} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken(Event):
    """A snapshot that is complete and can be gone back to, older ones are void.

    boundary   at which it was taken; None: there is none any more
    rank       whose own it is, which trains alone; None: that of all ranks
    """

    boundary: int | None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk from which all ranks can resume.

    boundary   of the optimizer step that it holds
    place      its directory
    """

    boundary: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAsked(Event):
    """The job's ranks are about to be started, and resume from a checkpoint instead of the top of the script.

    saved     the checkpoints from which they can resume, in the order of preference; at least one
    replicas  which of the ranks that have written the first one held the same
    """

    saved: tuple[Saved, ...]
    replicas: Replicas = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAsked(Event):
    """The user wants a checkpoint now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePersisted(Event):
    """A checkpoint is written, or could not be.

    generation    in which it was ordered
    place         where it is; "" if it was not written
    why_not       why it was not written; "" if it was
    why_unusable  why no run can resume from it, though it was written; "" if one can
    without       what a run that resumes from it has as its set-up makes it; "" if nothing
    is_handled    the script handles the signal that ends it, and must resume for that
    """

    generation: int
    place: str = ""
    why_not: str = ""
    why_unusable: str = ""
    without: str = ""
    is_handled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(Event):
    """A deadline that SetDeadline asked for is over. Deadlines are never taken back: a late one is an echo.

    generation, name, rank   as in the SetDeadline
    silent             ranks without a sign of life, or for which the others wait, as far as the agent knows
    """

    generation: int
    name: str
    silent: tuple[int, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRenewed(Event):
    """The agent has failed, and a new one goes on with this job: what was ordered last may not have been carried out.

    reason   what has failed, a phrase
    rank     whose own repair is concerned, see `alone.py`; None: the whole job
    """

    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestarted(Event):
    """The agent has ended all ranks and is starting them anew: a RankStarted for each follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAsked(Event):
    """Nodes join or leave: the group must start again on other nodes, from its state now.

    reason   which nodes, a phrase
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResized(Event):
    """The group starts again on other nodes; the job has their number of ranks already (`with_size`).

    saved      the checkpoint from which all resume; none: they run the script from its top
    replicas   as in ResumeAsked
    reason     which nodes, for an agent that did not lead before
    has_grown  nodes have come that were not there before
    """

    saved: tuple[Saved, ...]
    replicas: Replicas
    reason: str
    has_grown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """The job must end, once its state is written: the user or the scheduler has asked.

    reason   who asked, and why
    """

    reason: str
