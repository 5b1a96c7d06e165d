"""Set-ups run ahead (`--standby-depth setup`): for each rank of this node a process that waits before its first loop.

Each is a copy of the standby that runs the script's set-up in replay while its rank trains, one after the other and at
a low priority. If the rank is lost, it replaces it, and begins with the jump into the loop. If anything is not as
it was when it began, or there is none, the rank gets a copy of the standby as ever. Begin with `SetUps.look`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.processes import priority
from ttprun.agent.processes.process_watch import ProcessWatch
from ttprun.agent.processes.rank_processes import RankHandler, StandbyHandler, kill_session
from ttprun.agent.processes.standbys import Standbys
from ttprun.protocol import from_rank, standbys, to_rank
from ttprun.protocol.board import Field
from ttprun.tensors.memory import free_bytes

logger = logging.getLogger("ttprun")
PART = "set-ups run ahead"
_FIRST_BOUNDARY = 3  # from here on no replay begins at the script's top


@dataclass
class PreparedSetUp:
    """One of these processes.

    welcome   with which it was started
    records   inode of the records that it had then
    is_ready  it waits before its first loop
    """

    handler: StandbyHandler
    welcome: to_rank.Welcome
    records: int
    is_ready: bool = False


class SetUps:
    """The set-ups that are run ahead on this node.

    watch   knows what to welcome a process with
    """

    def __init__(self, node: Node, standbys: Standbys, watch: ProcessWatch) -> None:
        self._node = node
        self._watch = watch
        self._standbys = standbys
        self._is_wanted = node.config.standby_depth == "setup"
        self._waiting: dict[int, PreparedSetUp] = {}
        self._why_not = ""

    def begin_group(self) -> None:
        """All ranks are new."""
        self.end()
        config = self._node.config
        reasons = (
            (bool(self._node.peers.address), "the job is on several nodes"),
            (config.mindio, "the framework recovers by itself (--mindio)"),
            (not config.standbys, "there is no standby (--standbys 0)"),
        )
        self._why_not = next((why_not for is_so, why_not in reasons if is_so), "")

    def look(self) -> None:
        """Begin the next one, if nothing else is going on."""
        node = self._node
        if not self._is_wanted or self._why_not or node.job.phase is not recovery.JobPhase.RUNNING:
            return
        missing = [slot for slot in node.here if slot.rank not in self._waiting and slot.is_present]
        is_busy = any(not one.is_ready for one in self._waiting.values())
        if not missing or is_busy or not self._standbys.are_settled or not self._has_begun():
            return
        free, needed = free_bytes(), _own_memory(missing[0].pid)
        if free is not None and free < 2 * needed:
            self._give_up(f"rank {missing[0].rank} takes {needed >> 20} MiB, and {free >> 20} MiB are free")
            return
        copy = self._standbys.copy()
        if copy is None:
            return
        slot = missing[0]
        priority.lower(copy.process.pid)
        handler = StandbyHandler(slot.handler.start, copy)
        welcome, fds = self._watch.introduction(slot, handler, is_replacement=True)
        one = self._waiting[slot.rank] = PreparedSetUp(handler, _lasting(welcome), os.fstat(slot.record_fd).st_ino)
        handler.channel.send(replace(_lasting(welcome), is_ahead=True), fds)
        sock = handler.channel.sock

        def read() -> None:
            node.domains.run(PART, partial(self._read, slot.rank, one))

        node.selector.register(sock, selectors.EVENT_READ, read)

    def _has_begun(self) -> bool:
        board = self._node.board
        return all(board.get(slot.rank, Field.RECORDED) >= _FIRST_BOUNDARY for slot in self._node.here)

    def _read(self, rank: int, one: PreparedSetUp) -> None:
        try:
            messages = one.handler.channel.read_available()
        except (EOFError, OSError):
            self._drop(rank)
            if not one.is_ready:
                self._give_up(f"the set-up of rank {rank} ends its process")
            return
        for message in messages:
            why_not = ""
            match message:
                case standbys.SetUpDone(why_not=why_not, took_s=took_s):
                    one.is_ready = not why_not
                    fields = {"took_s": took_s, "bytes": _own_memory(one.handler.proc.pid), "why_not": why_not}
                    self._node.log("set_up_ahead", rank=rank, pid=one.handler.proc.pid, **fields)
                case from_rank.RankUnprotected(reason=reason):
                    why_not = reason
                case from_rank.ScriptError(error=error):
                    why_not = error
            if why_not:
                self._drop(rank)
                self._give_up(f"rank {rank}: {why_not}")
                return

    def _give_up(self, why_not: str) -> None:
        """Nothing is run ahead any more: replacements run the set-up themselves, as without the option."""
        self._why_not = why_not
        logger.warning("no set-up is run ahead from now on (--standby-depth setup): %s", why_not)
        self._node.log("set_up_given_up", reason=why_not)

    def take(self, slot: RankSlot) -> RankHandler | None:
        """The process that has run the set-up of a lost rank; None if there is none, or it does not fit."""
        one = self._waiting.get(slot.rank)
        if one is None:
            return None
        welcome, _ = self._watch.introduction(slot, one.handler, is_replacement=True)
        is_alike = _lasting(welcome) == one.welcome and os.fstat(slot.record_fd).st_ino == one.records
        is_replay = slot.stored is None or slot.stored.origin is None
        is_alive = one.is_ready and one.handler.proc.poll() is None
        if not (is_alive and is_alike and is_replay and not welcome.faults and self._has_begun()):
            self._drop(slot.rank)
            return None
        del self._waiting[slot.rank]
        self._unregister(one)
        priority.restore(one.handler.proc.pid)
        return one.handler

    def _unregister(self, one: PreparedSetUp) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._node.selector.unregister(one.handler.channel.sock)

    def _drop(self, rank: int) -> None:
        one = self._waiting.pop(rank)
        self._unregister(one)
        kill_session(one.handler.proc.pid)
        one.handler.close(signal.SIGKILL)
        one.handler.channel.close()
        self._node.in_background(one.handler.proc.wait, failed=partial(self._node.domains.note, PART))

    def end(self) -> None:
        """Kill those that were not needed."""
        for rank in list(self._waiting):
            self._drop(rank)

    @property
    def state(self) -> str:
        """How they stand, for people; "" if none are wanted."""
        if not self._is_wanted:
            return ""
        if self._why_not:
            return f"no set-up is run ahead: {self._why_not}"
        return f"set-ups run ahead: {sum(one.is_ready for one in self._waiting.values())} of {len(self._node.here)}"


def _lasting(welcome: to_rank.Welcome) -> to_rank.Welcome:
    """What of it must be the same when the rank is lost."""
    return replace(welcome, generation=0, faults=[], had_torch=True)


def _own_memory(pid: int) -> int:
    """Bytes that a process has written to, and shares with no other but what it was forked from; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
        return int(found[1]) << 10 if found else 0
    return 0
