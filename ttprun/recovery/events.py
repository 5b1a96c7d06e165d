"""Events: what has happened, in the past tense. Data only.

Every event carries `at_s`, seconds on a monotonic clock, stamped where the event came in: the machine has no clock.
Those that a rank sends about a repair carry the generation they belong to; `machine.is_echo` drops those of another.

For each rank the agent must keep the order of things: RankStarted before anything else of that process, then all that
the process has sent, then its RankExited. After KillRank nothing of that process may come but its RankExited. Between
ranks any order will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ttprun.recovery.replicas import UNKNOWN, Replicas
from ttprun.recovery.shards import ReplicaGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened.

    at_s   seconds, monotonic, never less than that of the event before
    """

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent(Event):
    """Something happened to one rank.

    rank   0 .. world_size - 1
    """

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairEvent(RankEvent):
    """A rank reports on a repair.

    generation   that of the order which the rank has carried out
    """

    generation: int


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
class RankHoldsAlone(RankEvent):
    """Part of what each rank holds is in no other rank: when one is lost, all must go back to where it was stored.

    reason   what that is, for the operator
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
class RankExited(RankEvent):
    """A rank's process has ended.

    pid                the process; an exit of any other than the rank's present one is an echo
    code               exit code, None if a signal ended it; 0 says that the script has finished
    signal             number of the signal, else None
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   seconds between the death and the agent's seeing it
    is_script_error    the script's own uncaught exception ended it
    device_fault       what has happened to its device, "" if nothing is known of that
    reason             root cause if the agent knows it, else ""
    """

    pid: int
    code: int | None
    signal: int | None
    boundary: int
    detected_after_s: float = 0.0
    is_script_error: bool = False
    device_fault: str = ""
    reason: str = ""

    @property
    def is_finish(self) -> bool:
        """The script came to its end; everything else is a fault."""
        return self.code == 0 and self.signal is None

    @property
    def kind(self) -> str:
        """The fault in two words: "exception", "signal 9", "exit 3", "device-lost"."""
        if self.device_fault:
            return self.device_fault
        if self.is_script_error:
            return "exception"
        if self.signal is not None:
            return f"signal {self.signal}"
        return "exit" if self.code is None else f"exit {self.code}"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        if self.device_fault:
            how = f"ended with a device fault ({self.device_fault})"
        elif self.is_script_error:
            how = "ended with an uncaught exception"
        elif self.signal is not None:
            how = f"was ended by signal {self.signal}"
        else:
            how = "ended" if self.code is None else f"exited with code {self.code}"
        return f"rank {self.rank} {how} at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFaulted(RankEvent):
    """A transient error has ended a rank's script; the process lives, and waits for orders to run it again.

    pid                the process; if it is not the rank's present one, this is an echo
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   the rank says so at once
    device_fault       what has happened to its device, "" if it is another error
    reason             the error
    """

    pid: int | None
    boundary: int
    detected_after_s: float = 0.0
    device_fault: str = ""
    reason: str = ""

    is_script_error: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The fault in a word: "exception", "memory-persistent"."""
        return self.device_fault or "exception"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        what = f"a device fault ({self.device_fault})" if self.device_fault else "a transient error"
        return f"rank {self.rank} met {what} at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHung(RankEvent):
    """A rank's process is there, but does not get on while others wait for it. It is killed, and then lost.

    pid                the process; if it is not the rank's present one, this is an echo
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   seconds since it last got on
    reason             how it hangs: phase, collective, how long, innermost frame
    """

    pid: int | None
    boundary: int
    detected_after_s: float = 0.0
    reason: str = ""

    kind: ClassVar[str] = "hang"
    is_script_error: ClassVar[bool] = False

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} hung at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDiverged(RankEvent):
    """A rank's weights differ from the majority's. It is killed, and so lost; its replacement gets the majority's.

    pid                the process; if it is not the rank's present one, this is an echo
    boundary           newest boundary in the rank's record
    detected_after_s   not known: a replica may have diverged at any moment since all were last alike
    reason             at which boundary it was seen
    """

    pid: int | None
    boundary: int
    detected_after_s: float = 0.0
    reason: str = ""

    kind: ClassVar[str] = "divergence"
    is_script_error: ClassVar[bool] = False

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} has diverged ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBroken(Event):
    """A connection between ranks is broken or silent, though every process lives and all ranks are equally far.

    generation         of the connections
    boundary           newest boundary that all ranks have passed
    rank               whose device has lost a link; None: nobody's, or it is not known whose
    detected_after_s   seconds since anything last moved
    device_fault       the device fault, "" if it is none
    reason             who noticed, and how
    """

    generation: int
    boundary: int
    rank: int | None = None
    detected_after_s: float = 0.0
    device_fault: str = ""
    reason: str = ""

    @property
    def kind(self) -> str:
        """The fault in a word: "connection", "link"."""
        return self.device_fault or "connection"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"the connections broke at boundary {self.boundary} ({self.reason})"


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
    """

    boundary: int
    digest: str
    has_group: bool


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
    boundary   of the checkpoint that all ranks have loaded, since nobody held the state; None: it came from the source
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

    reason   which check, and the two values
    """

    reason: str

    kind: ClassVar[str] = "mismatch"


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
    is_handled    the script handles the signal that ends it, and must resume for that
    """

    generation: int
    place: str = ""
    why_not: str = ""
    why_unusable: str = ""
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
class GroupRestarted(Event):
    """The agent has ended all ranks and is starting them anew: a RankStarted for each follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """The job must end, once its state is written: the user or the scheduler has asked.

    reason   who asked, and why
    """

    reason: str


EVENT_TYPES: tuple[type[Event], ...] = (
    RankStarted,
    SpawnFailed,
    RankProtected,
    RankUnprotected,
    RankHoldsAlone,
    RanksCompared,
    RankTrainsAlone,
    RankJoined,
    RankHindered,
    RankExited,
    RankFaulted,
    RankHung,
    RankDiverged,
    ConnectionBroken,
    ReplacementAsked,
    ElasticDeclared,
    DowngradeAsked,
    UpgradeAsked,
    RankFrozen,
    RankReplayed,
    StateSent,
    RankRepaired,
    RankRebuilt,
    RankReissued,
    MismatchFound,
    SnapshotTaken,
    ResumeAsked,
    CheckpointAsked,
    StatePersisted,
    DeadlinePassed,
    GroupRestarted,
    StopAsked,
)


def _cause(reason: str) -> str:
    return f" ({reason})" if reason else ""
