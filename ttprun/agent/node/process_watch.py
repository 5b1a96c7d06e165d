"""Watching the processes of ranks: what they send, the first sign of their end, and the end itself.

Everything that is seen is reported to the agent that leads, but for what concerns this node alone.
Begin with `ProcessWatch.welcome`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from ttprun.agent.base import life_signs
from ttprun.agent.base.life_signs import Causes
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.agent.node.rank_processes import RankHandler, StandbyHandler, command_of, with_agent
from ttprun.agent.node.standbys import PART, StandbyWatch
from ttprun.agent.node.state_copies import Memory
from ttprun.agent.node.unhooked_ranks import UnhookedRanks
from ttprun.chaos.injections import Injections
from ttprun.protocol import from_rank, standby_messages, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.protocol.node_messages import Said
from ttprun.protocol.rank_events import RankStarted

logger = logging.getLogger("ttprun")
DEATH_LIMIT_S = 10.0  # of a process that was sent SIGKILL
_LOOK_AGAIN_S = 0.05


@dataclass
class ProcessWatch:
    """Watches the processes of a node's ranks, by its selector."""

    _node: Node
    _memory: Memory
    _mirrors: Mirrors
    _injections: Injections
    _unseen: UnhookedRanks
    _standby_watch: StandbyWatch
    _causes: Causes = field(default_factory=Causes)
    _undead: list[RankHandler] = field(default_factory=list)

    def introduction(
        self, slot: Process, handler: RankHandler, is_replacement: bool
    ) -> tuple[to_rank.Welcome, list[int]]:
        """The first message to a process of a rank, and the descriptors that come with it.

        slot             of the rank that it becomes
        handler          of the process; a standby also gets the environment and the outputs of a rank
        is_replacement   it takes the place of a lost process
        """
        node = self._node
        config = node.config
        rungs = node.rungs
        options = to_rank.Options(
            allow_faults=config.allow_faults,
            keeps_state=not rungs.isdisjoint(("rewind", "persist")),
            mirror=self._mirrors.paths_for(slot.rank),
            mirror_copies=self._mirrors.copies.paths_for(slot.rank),
            mirror_copies_bytes=self._mirrors.copies.limit_bytes,
            own_state=self._memory.paths_for(slot.local_rank),
            buffers=self._memory.snapshots_of(slot.local_rank),
            snapshot_every_steps=node.interval.steps or 0,
            record_limit_mib=config.record_limit_mib,
            journal_limit_mib=config.journal_limit_mib,
            commit_timeout_s=config.commit_timeout_s,
            is_replaced="replace" in rungs,
            verify_every=config.verify_every,
            overhead_budget=config.overhead_share,
            nan_limit_s=config.nan_limit_s,
            user_paths=config.user_paths,
            follow=config.follow,
            loops=node.loops,
            may_rerun="rerun" in rungs,
            retry_on=config.retry_on,
            device_errors=config.device_errors,
            mindio=config.mindio,
            is_strict=config.proof == "strict",
            prints_traceback=bool(handler.start["stderr"]),
        )
        fds, environment = [node.board_fd, slot.record_fd, slot.stack_fd], {}
        if node.peers.address:
            fds.append(slot.copies_fd)
        if isinstance(handler, StandbyHandler):
            environment = with_agent(os.environ | handler.start["env"], str(node.run.path))
            fds += handler.outputs()
        welcome = to_rank.Welcome(
            rank=slot.rank,
            local_rank=slot.local_rank,
            world_size=node.world_size,
            local_world_size=len(node.here),
            address=node.peers.address,
            generation=node.generation,
            run_dir=str(node.run.path),
            is_replacement=is_replacement,
            had_torch=slot.had_torch,
            options=options,
            arguments=command_of(handler.start) if node.is_python else [],
            faults=self._injections.waiting_in(slot.rank),
            env=environment,
        )
        return welcome, fds

    def welcome(self, slot: Process, is_replacement: bool) -> None:
        """Have a process know who it is, and listen to it."""
        node, handler = self._node, slot.handler
        handler.channel.send(*self.introduction(slot, handler, is_replacement))
        node.selector.register(handler.channel.sock, selectors.EVENT_READ, lambda: self._on_message(slot, handler))
        node.selector.register(slot.pidfd, selectors.EVENT_READ, lambda: self._on_exit(slot))
        node.log("rank_started", rank=slot.rank, pid=slot.pid, is_replacement=is_replacement)
        was_ready, slot.had_to_wait = isinstance(handler, StandbyHandler) and not slot.had_to_wait, False
        node.report(RankStarted(at_s=time.monotonic(), rank=slot.rank, pid=slot.pid, had_standby=was_ready))
        if is_replacement:
            self._injections.forked(slot)

    def _on_message(self, slot: Process, handler: RankHandler) -> None:
        try:
            messages = handler.channel.read_available()
        except (EOFError, OSError):
            with contextlib.suppress(KeyError, ValueError):
                self._node.selector.unregister(handler.channel.sock)
            if slot.handler is handler:
                slot.hang_up()
            return
        self._take_all(slot, handler, messages)

    def _take_all(self, slot: Process, handler: RankHandler, messages: Sequence[Message]) -> None:
        """One after the other; if one of them breaks the supervisor, the new one takes those behind it."""
        for number, message in enumerate(messages):
            if slot.handler is not handler:
                return
            try:
                self._take(slot, message)
            except Exception:
                self._node.call(partial(self._take_all, slot, handler, messages[number + 1 :]))
                raise

    def _take(self, slot: Process, message: Message) -> None:
        node = self._node
        match message:
            case from_rank.RowChanged():
                node.share(slot.rank)
            case _ if isinstance(message, standby_messages.Report):
                node.domains.run(PART, lambda: self._standby_watch.take(slot, message))
            case Refused(reason=reason):
                node.refuse(slot.rank, reason)
            case _:
                node.report(Said(slot.rank, slot.pid, message))
        if isinstance(message, from_rank.Present):
            self._unseen.note_present(slot)
            self._look_out_for_its_end(slot)

    def _look_out_for_its_end(self, slot: Process) -> None:
        """A process has greeted: from now on the first sign of its end is looked out for, too."""
        handler = slot.handler

        def on_dying(code: int) -> None:
            if slot.handler is handler and slot.pidfd >= 0 and code != 0:  # one that finishes is not urgent
                slot.begin_to_die()
                self._on_end(slot, code)

        life_signs.watch(
            self._node.board,
            slot.rank,
            slot.pid,
            lambda code: self._node.call(lambda: on_dying(code)),
        )

    def _on_exit(self, slot: Process) -> None:
        """A process is gone; mostly that is known already."""
        self._node.selector.unregister(slot.pidfd)
        slot.kill()  # what it has started, as long as its number is its own
        handler = slot.handler
        if handler.proc.poll() is None:  # a debugger that is attached to it has to hear of it first
            self._node.in_background(lambda: _take_code(handler), lambda _: self._on_gone(slot, handler))
        else:
            self._on_gone(slot, handler)

    def _on_gone(self, slot: Process, handler: RankHandler) -> None:
        if slot.handler is not handler or slot.pidfd < 0:
            return
        was_dying, code = slot.is_dying, slot.bury()
        self._node.remove_left_files(slot.pid)
        if not was_dying:
            self._on_end(slot, code)

    def let_die(self, slot: Process) -> None:
        """A process is killed, or will be at once: what it may still send is not heard, and its rank is lost."""
        with contextlib.suppress(KeyError, ValueError):
            self._node.selector.unregister(slot.handler.channel.sock)
        slot.let_die()

    def look(self) -> None:
        """Do not wait longer for processes that do not die: one in an uninterruptible read may take hours."""
        self._undead = [handler for handler in self._undead if handler.proc.poll() is None]
        now = time.monotonic()
        for slot in self._node.here:
            if slot.is_dying and slot.is_spawn_due and now - slot.killed_at_s > DEATH_LIMIT_S:
                self._node.log("rank_does_not_die", rank=slot.rank, pid=slot.pid, for_s=now - slot.killed_at_s)
                logger.warning(
                    "rank %d's process %d does not die (it waits for a disk, or is frozen): its replacement does not "
                    "wait for that any longer",
                    *(slot.rank, slot.pid),
                )
                self._undead.append(slot.handler)
                self.forget(slot)

    def _on_end(self, slot: Process, code: int) -> None:
        node = self._node
        self._drain(slot)
        with contextlib.suppress(KeyError, ValueError):
            node.selector.unregister(slot.handler.channel.sock)
        event = slot.leave(code, node.board, self._causes.of_signal)
        if slot.is_finished:
            node.board.announce(slot.rank, Field.RECORDED, FINISHED)
            node.share(slot.rank)
            if event.reason:
                logger.warning("rank %d: %s", slot.rank, event.reason)
        else:
            slot.kill()  # its DataLoader workers
            self._unseen.settle()
        node.report(replace(event, traceback=slot.traceback))

    def _drain(self, slot: Process) -> None:
        """What a process has sent comes before its exit."""
        channel = slot.handler.channel
        with contextlib.suppress(EOFError, OSError):
            channel.sock.setblocking(False)
            while True:
                for message in channel.read_available():
                    self._take(slot, message)

    def report_missed(self, known: Mapping[int, int | None]) -> None:
        """Report what the machine does not know of this node's processes, after a failure of the supervisor.

        known   if it is in this agent: by rank the pid that it goes by, None for a lost rank without a process
        """
        node = self._node
        for slot in node.here:
            if slot.handler is None:
                continue
            code, pid = slot.handler.proc.poll(), known.get(slot.rank, slot.pid)
            is_known = pid != slot.pid if known else slot.is_lost or slot.is_finished
            if not is_known and code is not None:
                if slot.pidfd >= 0:
                    slot.begin_to_die()
                self._on_end(slot, code)
            elif not is_known:
                slot.live_on()
            elif pid is None and code is None and not slot.is_lost:
                node.report(RankStarted(at_s=time.monotonic(), rank=slot.rank, pid=slot.pid))

    def forget(self, slot: Process) -> None:
        if slot.handler is None:  # the group is ended before all of it was started
            return
        for watched in (slot.pidfd, slot.handler.channel.sock):
            with contextlib.suppress(KeyError, ValueError):
                self._node.selector.unregister(watched)
        slot.forget_process()


def _take_code(handler: RankHandler) -> None:
    """Wait for an exit code that the kernel holds back."""
    while handler.proc.poll() is None:
        time.sleep(_LOOK_AGAIN_S)
