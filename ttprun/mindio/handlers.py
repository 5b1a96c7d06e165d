"""The handlers of a recovery's phases: the framework's callbacks, or our defaults.

Our stop and clean call the device layer; our repair sends the optimizers' state to a rank that has lost it; our rebuild
connects the process groups (always, before the framework's own). At the end of a framework's steps random states are
kept, and a scheduler's pause is waited for. Before them come the values of MindIO's interface: its enums and return
codes, limits of its arguments, and what errors mean. Begin with `Handlers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack

from ttprun.capture.records.recorder import Recorder
from ttprun.device import interface
from ttprun.device.device_errors import UpdateTimes, error_time_us
from ttprun.device.interface import MemoryCheck
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import mindio
from ttprun.protocol.board import LEADER, Field, Phase

# The numbers of MindIO's interface: enums and return codes.

RET_OK = 0
RET_ERROR = 1
RET_NO_REBUILD = 2  # of a clean handler: the failed memory was unused, so no state needs to be sent


class Action(Enum):
    """What the main thread does after its wait."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """Index of a group in the argument of tft_set_optimizer_replica."""

    ATTENTION = 0
    MOE = 1


class PauseType(Enum):
    """What tft_pause_train does at a pause."""

    PAUSE = 1
    RAISE = 2


class ReportState(Enum):
    """The state that a rank reports."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


def value_of(code: Enum | int) -> int:
    """The number of a code, given as an enum or a number."""
    return int(code.value) if isinstance(code, Enum) else int(code)


# MindIO's limits for arguments.

MOST_RANKS = 100_000
PORTS = range(1024, 65536)


def check_rank(who: str, rank: int, world_size: int) -> None:
    """Raise ValueError unless the rank is in the world, and the world is not too large.

    who          MindIO's function, for the message
    rank         0 to world_size - 1
    world_size   1 to MOST_RANKS
    """
    if not 0 < world_size <= MOST_RANKS:
        raise ValueError(f"{who}: world_size is {world_size}; give 1 to {MOST_RANKS}")
    if not 0 <= rank < world_size:
        raise ValueError(f"{who}: rank is {rank}; give 0 to {world_size - 1}")


def check_port(who: str, port: int) -> None:
    """Raise ValueError for privileged or impossible ports."""
    if port not in PORTS:
        raise ValueError(f"{who}: port is {port}; give {PORTS.start} to {PORTS.stop - 1}")


# The meaning of the train function's errors: one table of substrings, in MindIO's order.
#
# Each is searched for in `str(error)` of a RuntimeError; the first found wins. A framework may add rows. Read
# `ErrorTable.classify` first.

FORCE_STOP = "FORCE STOP"
ARF_FINISH = "ARF FINISH"
STEP_FINISH = "STEP FINISH"
OTHER = "OTHER"
REPAIRABLE, CORRUPTED = "HBM MULTI BIT ECC can repair", "HBM MULTI BIT ECC can't repair"


class ErrorTable:
    """The rows: substring -> function from the message to a kind; and kind -> state to report.

    is_retried   device errors are repaired in the same process; else they are like any other error
    """

    def __init__(self, times: UpdateTimes) -> None:
        self.is_retried = True
        self._times = times
        self.kinds: dict[str, Callable[[str], str]] = {
            "UCE ERROR": lambda text: self._if_retried("UCE ERROR"),
            "HBM MULTI BIT ECC": self._of_hbm_error,
            FORCE_STOP: lambda text: FORCE_STOP,
            ARF_FINISH: lambda text: ARF_FINISH,
            STEP_FINISH: lambda text: STEP_FINISH,
            "HCCL OP RETRY FAILED": lambda text: self._if_retried("HCCL OP RETRY FAILED"),
            "SUSPECT REMOTE ERROR": lambda text: self._if_retried("SUSPECT REMOTE ERROR"),
            "UB LINK ERROR": lambda text: self._if_retried("UB LINK ERROR"),
            "HCCS LINK ERROR": lambda text: self._if_retried("HCCS LINK ERROR"),
        }
        self.states: dict[str, str] = {
            FORCE_STOP: "RS_NORMAL",
            "UCE ERROR": "RS_UCE",
            REPAIRABLE: "RS_UCE",
            CORRUPTED: "RS_UCE_CORRUPTED",
            ARF_FINISH: "RS_PREREPAIR_FINISH",
            STEP_FINISH: "RS_STEP_FINISH",
            "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
            "SUSPECT REMOTE ERROR": "RS_HCCL_FAILED",
            "UB LINK ERROR": "RS_HCCL_FAILED",
            "HCCS LINK ERROR": "RS_HCCL_FAILED",
            OTHER: "RS_UNKNOWN",
        }

    def add(self, pattern: str, state: str, kind_of: Callable[[str], str]) -> None:
        """Append a row.

        state     name of a ReportState, for the kind of the same name as the pattern
        kind_of   given the message; returns a kind

        Raises ValueError if there is no such state.
        """
        if state not in ReportState.__members__:
            raise ValueError(f"'{state}' is not a state to report; use one of {', '.join(ReportState.__members__)}")
        self.states[pattern] = state
        self.kinds[pattern] = kind_of

    def classify(self, error: BaseException) -> ReportState:
        """The state to report for an error; RS_UNKNOWN if it is not in the table."""
        if not isinstance(error, RuntimeError):
            return ReportState.RS_UNKNOWN
        text = str(error)
        kind = next((kind_of(text) for pattern, kind_of in self.kinds.items() if pattern in text), OTHER)
        return ReportState[self.states.get(kind, "RS_UNKNOWN")]

    def _if_retried(self, kind: str) -> str:
        return kind if self.is_retried else OTHER

    def _of_hbm_error(self, text: str) -> str:
        return self._if_retried(REPAIRABLE if self._times.can_repair(error_time_us(text)) else CORRUPTED)


# The handlers.

STOP, CLEAN, REBUILD, REPAIR, ROLLBACK = "stop", "clean", "rebuild_group", "repair", "rollback"
SAVE, RENAME, EXIT, SYNC = "save_ckpt", "rename", "exit", "stream_sync"
DOWNGRADE_REBUILD, UPGRADE_REBUILD = "zit_downgrade_rebuild", "zit_upgrade_rebuild"
UPGRADE_REPAIR, UPGRADE_ROLLBACK = "zit_upgrade_repair", "zit_upgrade_rollback"
NAMES = (STOP, CLEAN, REBUILD, REPAIR, ROLLBACK, SAVE, RENAME, EXIT, SYNC)
OF_SIZE = (DOWNGRADE_REBUILD, UPGRADE_REBUILD, UPGRADE_REPAIR, UPGRADE_ROLLBACK)


@dataclass(frozen=True)
class Size:
    """The group after a recovery.

    ranks          all ranks of a smaller group; () if no rank is away
    data_parallel  those of this rank's first data-parallel group
    params         of a smaller or larger group, from the scheduler or MindCluster; "" if the size does not change
    """

    ranks: tuple[int, ...] = ()
    data_parallel: tuple[int, ...] = ()
    params: str = ""

    @property
    def is_smaller(self) -> bool:
        """Whether some ranks are away."""
        return bool(self.ranks)

    @property
    def is_whole_again(self) -> bool:
        """Whether the ranks that were away are back."""
        return bool(self.params) and not self.ranks


UNCHANGED = Size()


class CallbackFailedError(RuntimeError):
    """A callback of the framework is missing or has failed."""


class Handlers:
    """The callbacks of one rank.

    args   given to each callback: the decorated function's arguments, or those of tft_set_step_args
    """

    def __init__(self) -> None:
        self.args: Any = None
        self._registered: dict[str, tuple[Callable[..., Any], Any]] = {}

    def register(self, name: str, function: Callable[..., Any], ctx: Any) -> None:
        """Register a callback; it replaces an earlier one of the same name.

        name       one of NAMES or OF_SIZE
        ctx        any object of the framework's, handed back to the callback

        Raises ValueError if callbacks have no such name, TypeError if it is no function.
        """
        if name not in (*NAMES, *OF_SIZE):
            raise ValueError(f"there is no handler '{name}'")
        if not callable(function):
            raise TypeError(f"the {name} handler must be a function, not {type(function).__name__}")
        self._registered[name] = (function, ctx)

    def has(self, name: str) -> bool:
        """Whether the framework has registered such a callback."""
        return name in self._registered

    def stop(self) -> None:
        """Stop all work on the device. Raises what the callback raises."""
        if self.has(STOP):
            function, ctx = self._registered[STOP]
            function(self.args, ctx)
        else:
            interface.current().stop()

    def clean(self, is_uce: bool) -> int:
        """Make the device ready again; returns RET_OK or RET_NO_REBUILD.

        is_uce   memory of this rank's device has failed

        Raises CallbackFailedError for another return value, and what the callback raises.
        """
        if self.has(CLEAN):
            function, ctx = self._registered[CLEAN]
            code = function(is_uce, self.args, ctx)
        else:
            code = self._clean_device(is_uce)
        if code not in (RET_OK, RET_NO_REBUILD):
            raise CallbackFailedError(f"the clean handler returned {code!r}")
        return int(code)

    def _clean_device(self, is_uce: bool) -> int:
        device = interface.current()
        check = device.check_memory() if is_uce else MemoryCheck.NONE
        if check is MemoryCheck.OUTSIDE_POOL:
            return RET_ERROR
        device.clean()
        device.rebuild_communicators()
        device.restart()
        return RET_NO_REBUILD if check is MemoryCheck.TEMPORARY else RET_OK

    def rebuild_group(self, fault_ranks: list[int], size: Size = UNCHANGED) -> None:
        """Rebuild the framework's own communication; our process groups are connected already.

        The callback gets the remaining ranks of a smaller group, or those that are back in a larger one.

        Raises CallbackFailedError if none is registered.
        """
        if size.is_smaller and self.has(DOWNGRADE_REBUILD):
            function, _ = self._registered[DOWNGRADE_REBUILD]
            function(list(size.data_parallel), list(size.ranks), self.args, size.params)
        elif size.is_smaller:
            raise CallbackFailedError("no zit_downgrade_rebuild handler is registered")
        elif (handler := self._of_upgrade(UPGRADE_REBUILD, REBUILD, size)) is not None:
            function, last = handler
            function(fault_ranks, self.args, last)

    def repair(
        self, step: int, needs_rebuild: bool, error_ranks: list[int], info: dict[str, Any], size: Size = UNCHANGED
    ) -> bool:
        """Do this rank's part of a repair.

        step            boundary at which all ranks stand
        needs_rebuild   this rank's state has to be made first
        error_ranks     ranks that are repaired
        info            the part, as MindIO describes it to the callback
        size            of the group, if that changes
        returns         False if the framework has no handler
        """
        handler = self._of_upgrade(UPGRADE_REPAIR, REPAIR, size)
        if handler is None:
            return False
        function, last = handler
        function(step, needs_rebuild, error_ranks, info, self.args, last)
        return True

    def rollback(self, step: int, size: Size = UNCHANGED) -> None:
        """Reset what depends on the step: learning rate, data position, weights from the optimizer's copy."""
        handler = self._of_upgrade(UPGRADE_ROLLBACK, ROLLBACK, size)
        if handler is not None:
            function, last = handler
            function(step, self.args, last)

    def _of_upgrade(self, name: str, otherwise: str, size: Size) -> tuple[Callable[..., Any], Any] | None:
        """The function to call and its last argument; None if there is neither."""
        if size.is_whole_again and self.has(name):
            return self._registered[name][0], size.params
        return self._registered.get(otherwise)

    def save(self, step: int, save_info: list[dict[str, Any]]) -> None:
        """Write this rank's part of a checkpoint.

        step        its boundary
        save_info   who writes what, as MindIO describes it: [{type, ranks}]
        """
        function, ctx = self._registered[SAVE]
        function(step, save_info, self.args, ctx)

    def rename(self, step: int) -> None:
        """All ranks have written their parts: finish the checkpoint."""
        if self.has(RENAME):
            function, _ = self._registered[RENAME]
            function(step, self.args)

    def sync_stream(self) -> None:
        """Wait for all work on the device."""
        if self.has(SYNC):
            function, _ = self._registered[SYNC]
            function()


# Whether this rank can continue in a smaller group (MindIO's ZIT): it is switched on, and has a handler.
#
# The handler is called by `Handlers.rebuild_group`; the agent decides which ranks leave (`ttprun.recovery.on_leave`).


class Elastic:
    """The framework's switches.

    is_on                    tft_init_processor: enable_zit
    is_on_in_the_controller  tft_init_controller: enable_zit; True if this process has no controller
    """

    def __init__(self, session: Rank, handlers: Handlers) -> None:
        self._session, self._handlers = session, handlers
        self.is_on = False
        self.is_on_in_the_controller = True

    def report(self) -> None:
        """Report to the agent if both switches are on and there is a handler."""
        if self.is_on and self.is_on_in_the_controller and self._handlers.has(DOWNGRADE_REBUILD):
            self._session.channel.send(mindio.ElasticDeclared())


# Random states of each step, kept in shared memory that outlives the process; MindIO does not restore them.
#
# A survivor has drawn in the step that is run again, a replacement has drawn nothing: both get the states from before
# the last update of the optimizer. Generators in a framework's own objects are not included.


def keep(session: Rank, step: int) -> None:
    """Keep the states with which all resume after `step`."""
    session[Recorder].write(step, msgpack.packb(random_state.capture()), [])


def restore(session: Rank, step: int) -> bool:
    """Restore the states kept for `step`; False if there are none."""
    stored = session[Recorder].read(step)
    if stored is None:
        return False
    random_state.restore(msgpack.unpackb(stored[0]))
    return True


# A pause: all ranks wait after the same step, at a scheduler's request.
#
# The agent writes the request to the board. The first rank of the node writes the step after which all wait there,
# before it announces that it is ready for that step's update; the others read it after the update, for which all had
# to be ready. So no rank passes the pause while others wait in it. Begin with `Pauses.wait`.

_LOOK_AGAIN_S = 0.1


class Pauses:
    """A rank's part in a pause."""

    def __init__(self, session: Rank) -> None:
        self._session = session

    def agree(self, step: int) -> None:
        """Before the update to `step` is announced: the first rank decides whether all wait after it."""
        session, board = self._session, self._session.board
        is_open = board.get(LEADER, Field.PAUSE_AT) <= session.applied
        if session.local_rank == LEADER and board.get(LEADER, Field.PAUSE_ASKED) and is_open:
            board.set(LEADER, Field.PAUSE_AT, step)

    def wait(self, sync: Callable[[], None], admit: Callable[[], None]) -> None:
        """Wait if the pause is after the newest step; ended by the agent, or by `admit`, which raises in a recovery.

        sync   called before the wait: waits for all work on the device
        """
        session = self._session
        number = session.board.get(LEADER, Field.PAUSE_ASKED)
        if not self._is_on(number):
            return
        sync()
        session.touch(Phase.COMMITTING)  # a missing rank is detected as one that others wait for before a step
        session.channel.send(mindio.Paused(number))
        with session.changed:
            while self._is_on(number):
                admit()
                session.changed.wait(_LOOK_AGAIN_S)
        session.touch(Phase.COMPUTING)

    def _is_on(self, number: int) -> bool:
        board = self._session.board
        is_asked = number != 0 and board.get(LEADER, Field.PAUSE_ASKED) == number
        return is_asked and board.get(LEADER, Field.PAUSE_AT) == self._session.applied
