"""What a rank reports to the agent: one class per message; `agent/lead/reports.py` handles them.

Reports of snapshots and checkpoints are in `snapshot_messages.py`, those of standbys and for them in
`standby_messages.py`, those of a framework with callbacks in `mindio.py`.

generation   number of the communicator set in which the rank is
boundary     number of optimizer steps that it has done
Times are seconds; `*_s` are durations, `at_s` is on the monotonic clock of the machine.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import field

from ttprun.protocol.codec import AtBoundary, Message, OfGeneration
from ttprun.protocol.meeting import GroupMembership
from ttprun.protocol.rank_events import LivingRankLost, MismatchFound, OfRank, RepairEvent, because
from ttprun.protocol.reason import Reason

# The beginning, and the end.


class Present(Message, frozen=True):
    """A process has started as a rank, and reads messages from now on.

    main_thread   ident of its main thread
    """

    pid: int
    main_thread: int


class RankProtected(OfRank, frozen=True):
    """All hooks are installed."""


class RankUnprotected(OfRank, frozen=True):
    """From now on this rank can neither be repaired nor help to repair another; the agent forwards it to all others.

    reason   why
    """

    reason: Reason


class RankHindered(OfRank, frozen=True):
    """Whether a replay would reach the newest boundary.

    reason   why it would not; none: it would (again)
    """

    reason: Reason
    boundary: int = 0


class RankTrainsAlone(OfRank, frozen=True):
    """The rank takes its steps without a process group, in a world of several ranks."""

    membership: ClassVar[GroupMembership] = GroupMembership.ALONE


class RankJoined(OfRank, frozen=True):
    """The rank is about to make a process group with others, or goes live with one after a replay."""

    membership: ClassVar[GroupMembership] = GroupMembership.JOINED


class StateKept(Message, frozen=True, kw_only=True):
    """A rank keeps a state for the first time, or cannot.

    boundary     of the state
    bytes        that it takes, or would take; 0: unknown
    why_not      "" if it can
    """

    boundary: int
    bytes: int = 0
    why_not: str = ""


class OwnStateKept(StateKept, frozen=True, kw_only=True):
    """A rank that is alone has kept its own state for the first time in this process, or cannot.

    took_s   processor time
    """

    took_s: float = 0.0


class StateMirrored(StateKept, frozen=True, kw_only=True):
    """A rank has mirrored its state for the first time in this process, or cannot.

    limit_bytes  that it may take
    why_no_step  why a step cannot be taken again from the mirror; "" if it can
    """

    limit_bytes: int = 0
    why_no_step: str = ""


class MirrorCopied(StateKept, frozen=True, kw_only=True):
    """A rank keeps the mirror of a rank of the node before, for the first time on this connection, or cannot.

    of           rank whose mirror it is
    limit_bytes  that all such copies of this node may take
    """

    of: int
    limit_bytes: int = 0


class CollectiveStep(Message, frozen=True):
    """An optimizer communicates inside step(): no rank that is in the middle of it holds the state of a boundary."""


class Note(Message, frozen=True):
    """Something that the operator should know."""

    text: str


class NotProved(Message, frozen=True):
    """What may change in the script, and is in no record; replaces the previous report.

    reasons         e.g. "cache (sqlite3.Connection): it is in a file"
    is_unrecorded   found by the rehearsal of the records: it cannot be restored
    """

    reasons: tuple[Reason, ...]
    is_unrecorded: bool = False


class ScriptError(Message, frozen=True):
    """An exception ends the script.

    error         in one line
    traceback     to be printed by the agent, since a script mostly fails in all ranks alike; "": the rank prints it
    detail        the same, for the event log
    device_fault  the `DeviceFault` that it means; "": none
    """

    error: str
    traceback: str
    detail: str
    device_fault: str


class RankFaulted(LivingRankLost, frozen=True, kw_only=True):
    """A transient error has ended the script.

    The process stays, and waits for orders to run it again.

    reason              the error, in one line
    detail              the traceback, for the event log
    device_fault        as in ScriptError
    pid, boundary       filled in by the agent
    detected_after_s    0: the rank says so at once
    """

    at_s: float = 0.0
    rank: int = -1
    pid: int | None = None
    boundary: int = 0
    detail: str = ""
    device_fault: str = ""

    @property
    def kind(self) -> str:
        """The fault in a word: "exception", "memory-persistent"."""
        return self.device_fault or "exception"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        what = f"a device fault ({self.device_fault})" if self.device_fault else "an error"
        return f"rank {self.rank} met {what} in step {self.boundary}{because(self.reason)}"


# Between ranks.


class Put(OfGeneration, frozen=True):
    """A value for all other ranks, mostly an address; the agent forwards it."""

    key: str
    value: bytes


class RowChanged(Message, frozen=True):
    """This rank has written to its row of the board what ranks of other nodes wait for; the agent lets them have it."""


# In a recovery.


CARRIED = "carried: "  # before a sequence: of what other threads had issued before that boundary, and still wait for


class GroupJournal(Message, frozen=True):
    """What a rank has issued in one process group since the newest boundary, or between two ranks of it.

    ranks     members of the group; of messages: sender, receiver
    issued    signature of each collective: op, shapes and dtypes; oldest first
    results   indices in `issued` of those whose result this rank has and can give to the others
    taken     indices of others that it has completed, and whose result is the same in all members
    received  digests of the messages that the rank has received, oldest first
    settled   numbers of those reduce-scatters of FSDP2 that all members have completed, as the rank knows
    """

    ranks: list[int]
    issued: list[str]
    results: list[int] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


class Broken(OfGeneration, frozen=True):
    """An operation has failed, and no fault has been reported.

    after_s       since it failed
    device_fault  name of the device fault that it means; "" if none
    """

    reason: str
    after_s: float
    device_fault: str


class RankFrozen(RepairEvent, frozen=True):
    """This rank has quiesced at a boundary.

    digest     of its weights and optimizer state; "" before the first step
    has_group  it has made a process group
    journal    by name of the group; the agent keeps it from the state machine
    is_at_end  its script has reached its end, and its process stays for the others; filled in by the agent
    """

    boundary: int
    digest: str = ""
    has_group: bool = False
    journal: dict[str, GroupJournal] = field(default_factory=dict)
    is_at_end: bool = False


class RankReplayed(RepairEvent, frozen=True):
    """A replacement has reached its boundary, and waits for the tensors.

    setup_s   from the start of the replay to the script's first step; None: it began at the first one
    """

    boundary: int
    setup_s: float | None = None


class StateSent(RepairEvent, frozen=True):
    """The source has sent its state to all receivers; `digest` is of what it has sent."""

    digest: str


class RankRepaired(RepairEvent, frozen=True):
    """A replacement has its state.

    digest     of what it has received
    boundary   of the checkpoint that all ranks have loaded, since no rank had the state; None: it came from the source
    """

    digest: str
    boundary: int | None = None


class RankRebuilt(RepairEvent, frozen=True):
    """Connected to all ranks of the generation."""


class RankReissued(RepairEvent, frozen=True):
    """All collectives since the boundary have been issued again, and have completed.

    A replacement has issued as many as the survivors had.
    """


class Compared(Message, frozen=True):
    """The comparison of a replacement with the lost rank.

    equal       what was equal
    not_proved  what could not be compared
    """

    equal: list[str]
    not_proved: list[str]


class Unaligned(AtBoundary, frozen=True):
    """A replacement waits before it records this boundary: its gradients may differ by rounding from those of others.

    The answer is `to_rank.GoOn`.
    """


class Aligned(AtBoundary, frozen=True):
    """This rank has taken the gradients of another rank, of the step before this boundary."""


# Numbers.


class Group(Message, frozen=True):
    """A process group that the script has made.

    dimension   of the mesh that it is along; "": it is of no mesh
    ranks       of its members, in order
    exchanges   gradients have come through an all_to_all
    messages    [rank of the sender, of the receiver] of those that this rank has sent or received
    """

    dimension: str
    ranks: list[int]
    exchanges: bool = False
    messages: list[list[int]] = field(default_factory=list)


class Held(Message, frozen=True):
    """Digests of a rank's trained tensors, before it commits a step.

    is_full  including gradients and optimizer state
    held     key of each parameter -> digests of its weights and of the rest; "" if not requested
    names    key -> the script's name for it, if known
    shards   key of each parameter of which it holds a part -> how it is cut, and which part, as its mesh declares it
    groups   of which it is a member
    why_not_stored   why neither snapshots nor checkpoints can hold the shards; "" if they can
    bytes    of the weights, or of its parts of them
    """

    boundary: int
    is_full: bool
    held: dict[str, tuple[str, str]]
    names: dict[str, str]
    shards: dict[str, tuple[str, str]]
    groups: list[Group]
    why_not_stored: str
    bytes: int = 0


class StoppedDivergent(Message, frozen=True):
    """A rank whose weights differ from its replicas' waits after a boundary, to be replaced."""


class NanFound(Message, frozen=True):
    """There is a NaN before a step.

    where   the collective or gradient
    is_own  it is in this rank's input, not only in the result of an all-reduce
    """

    step: int
    where: str
    is_own: bool


# Injected faults.


class FaultStruck(Message, frozen=True):
    """An injected fault has struck, or is about to.

    number  of the fault
    phase   in which
    detail  what it has done
    """

    number: int
    phase: str
    step: int
    at_s: float
    detail: str


class FaultFailed(Message, frozen=True):
    """An injected fault could not be caused."""

    number: int
    reason: str


OfAlignment = Unaligned | Aligned
Report = (
    Present | RankProtected | RankUnprotected | RankHindered | Note | NotProved | ScriptError
    | RankFaulted | RankTrainsAlone | RankJoined | OwnStateKept | StateMirrored | MirrorCopied | CollectiveStep
    | Put | RowChanged
    | Broken | RankFrozen | RankReplayed | StateSent | RankRepaired | RankRebuilt | RankReissued | MismatchFound
    | Compared | Unaligned | Aligned
    | Held | StoppedDivergent | NanFound
    | FaultStruck | FaultFailed
)  # fmt: skip
