"""The handlers of a recovery's phases: the framework's callbacks, or our defaults.

Our stop and clean call the device layer; our repair sends the optimizers' state to a rank that has lost it; our rebuild
connects the process groups (always, before the framework's own). At the end of a framework's steps random states are
kept, and a scheduler's pause is waited for. Begin with `Handlers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from ttprun.capture.records.recorder import Recorder
from ttprun.device import interface
from ttprun.device.interface import MemoryCheck
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import mindio
from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.rank.framework.codes import RET_ERROR, RET_NO_REBUILD, RET_OK

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
        device.restart()
        device.rebuild_communicators()
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
# The handler is called by `Handlers.rebuild_group`; the agent decides which ranks leave (`ttprun.recovery.resize`).


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
    device = interface.current()
    record = {"generators": random_state.capture(), "device": device.rng_state()}
    session[Recorder].write(step, msgpack.packb(record), [])


def restore(session: Rank, step: int) -> bool:
    """Restore the states kept for `step`; False if there are none."""
    stored = session[Recorder].read(step)
    if stored is None:
        return False
    record = msgpack.unpackb(stored[0])
    random_state.restore(record["generators"])
    if record["device"]:  # empty if the process had not used its device yet
        interface.current().restore_rng_state(record["device"])
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
