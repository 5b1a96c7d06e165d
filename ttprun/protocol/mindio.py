"""Messages between the agent and a rank with a framework that has callbacks (--mindio), in both directions.

Words and units are as in `from_rank.py`; MindIO's own words are kept where its handlers are given them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from msgspec import field

from ttprun.protocol.codec import AtBoundary, Message, OfGeneration
from ttprun.protocol.from_rank import GroupJournal

Strategy = Literal["retry", "recover", "dump", "unknow"]  # what a recovery comes to
Wish = Literal["retry", "recover", "migration", "downgrade", "upgrade", "dump", "continue", "exit"]
Asked = Literal[Wish, "stop", "pause", "hot switch", "stop switch"]  # by a scheduler
SchedulerAction = Literal["report_fault_ranks", "report_stop_complete", "report_strategies", "report_result"]


class RepairType(Enum):
    """A rank's part in a repair."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


# The parts of ranks that are repaired: a new process, memory that held state, memory that held nothing.
_LOSSES = (RepairType.RT_RECV_REPAIR, RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_UCE_LOWLEVEL)


# What a rank reports.


class ReplicasDeclared(Message, frozen=True):
    """The groups of ranks that hold the same state (tft_set_optimizer_replica)."""

    groups: list[DeclaredReplicas]


class DeclaredReplicas(Message, frozen=True):
    """These ranks hold `copies` copies of one state, `shift` places apart (0: one after the other)."""

    ranks: list[int]
    copies: int
    shift: int


class DataParallelDeclared(Message, frozen=True):
    """The data-parallel group of this rank (tft_set_dp_group_info)."""

    ranks: list[int]


class ElasticDeclared(Message, frozen=True):
    """This rank can continue in a smaller group."""


class SchedulerRegistered(Message, frozen=True):
    """A scheduler has registered its callbacks in this process."""


class SchedulerAsked(Message, frozen=True):
    """A request of the scheduler.

    what       in MindIO's words
    ranks      the ranks concerned -> kind of fault
    timeout_s  how long ranks wait in a pause; None: as configured
    params     JSON for the handlers; "": as MindCluster gives it
    """

    what: Asked
    ranks: dict[int, int] = field(default_factory=dict)
    timeout_s: float | None = None
    params: str = ""


class Paused(Message, frozen=True):
    """This rank waits in the pause of that number."""

    number: int


class Prepared(AtBoundary, frozen=True):
    """A rank is ready to be repaired.

    part     its need
    journal  its groups
    """

    part: RepairType
    journal: dict[str, GroupJournal]

    def __post_init__(self) -> None:
        if self.part not in _LOSSES:
            raise ValueError(f"part: {self.part.name} is not a loss")


class SavedByFramework(OfGeneration, frozen=True):
    """The save_ckpt handler has returned."""


class Renamed(OfGeneration, frozen=True):
    """The rename handler has made a checkpoint of what all have saved."""


# What the agent sends, instead of Replay, SendState and FetchState, Dump, and Resume.


class Size(Message, frozen=True):
    """The group after a recovery.

    away           ranks that do not train
    ranks          all that do; empty: the whole world
    data_parallel  this rank's remaining group; empty: as before
    params         JSON for the handlers of a downgrade or upgrade
    """

    away: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    data_parallel: list[int] = field(default_factory=list)
    params: str = ""


class Prepare(AtBoundary, frozen=True):
    """Get ready to be repaired: a new process, or one whose device's memory has failed; the answer is `Prepared`.

    reboot_type  why the rank has a new process
    """

    repair_type: Strategy
    reboot_type: Literal["arf", "hot switch"]


class RepairPart(Message, frozen=True):
    """One rank's part in a repair: MindIO's repair_info.

    type           kinds of state
    src, dst       ranks
    rank_list      all that hold this state
    """

    type: list[int]
    repair_type: RepairType
    src: list[int]
    dst: list[int]
    rank_list: list[int]


class Repair(AtBoundary, frozen=True):
    """Rebuild groups, and repair; the answer is `RankRepaired` from lost ranks, `StateSent` from the others.

    groups  names of those to connect, in this order
    """

    size: Size
    lost: list[int]
    groups: list[str]
    repair_type: Strategy
    parts: list[RepairPart]
    limit_s: float


class Rollback(AtBoundary, frozen=True):
    """Go back to the step, and train; the answers are `RankRebuilt` and `RankReissued`.

    groups  as in Repair
    loaded  step of the checkpoint that all must have loaded; 0: none
    """

    size: Size
    groups: list[str]
    loaded: int


class Saving(Message, frozen=True):
    """Ranks that save one kind of state together: MindIO's save_info."""

    type: int
    ranks: list[int]


class Save(OfGeneration, frozen=True):
    """Have the framework save its part of a checkpoint; the answer is `SavedByFramework`."""

    step: int
    saves: list[Saving]


class Rename(OfGeneration, frozen=True):
    """Have the framework finish the checkpoint that all have saved; the answer is `Renamed`."""

    step: int


class FailMemory(OfGeneration, frozen=True):
    """The scheduler reports that memory of this rank's device has failed."""


class SchedulerCall(Message, frozen=True):
    """Call the scheduler's callback of this name; JSON has made str of ints that are keys."""

    action: SchedulerAction
    arguments: list[Any]


Report = (
    ReplicasDeclared | DataParallelDeclared | ElasticDeclared | SchedulerRegistered | SchedulerAsked | Paused
    | Prepared | SavedByFramework | Renamed
)  # fmt: skip
OfRecovery = Prepare | Repair | Rollback | Save | Rename
Order = OfRecovery | FailMemory | SchedulerCall
