"""Watching the processes of ranks: what they send, the first sign of their end, and the end itself.

Everything that is seen is reported to the agent that leads, but for what concerns this node alone.
Begin with `ProcessWatch.welcome` (a process begins) and `_on_exit` (it ends).

Ranks that use torch while no hook of ours has spoken in them are not protected. One whose Python has loaded our
`sitecustomize` mostly reports that by itself (rank/bootstrap/unhooked.py). From outside are found: a Python that has
skipped it (-E, -I, -S, a wrapper), one that has taken the rank's place by exec, and training in a child of the rank.
Each is reported for what the process shows, never for how long it has been silent: on a busy machine all are. Begin
with `UnhookedRanks.look`.
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
from ttprun.agent.base.ground import FaultInjection
from ttprun.agent.base.life_signs import Causes
from ttprun.agent.base.loop import unwatch
from ttprun.agent.base.stored_states import path_of
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Node, Process
from ttprun.agent.node.rank_processes import (
    RankHandler,
    StandbyHandler,
    command_of,
    why_silent,
    with_agent,
)
from ttprun.agent.node.standbys import PART, StandbyWatch
from ttprun.agent.node.state_copies import Memory
from ttprun.protocol import from_rank, standby_messages, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.protocol.from_rank import RankUnprotected
from ttprun.protocol.node_messages import Said
from ttprun.protocol.rank_events import RankStarted
from ttprun.protocol.reason import Reason
from ttprun.rank.bootstrap import unhooked

logger = logging.getLogger("ttprun")
DEATH_LIMIT_S = 10.0  # of a process that was sent SIGKILL
_LOOK_AGAIN_S = 0.05


@dataclass
class ProcessWatch:
    """Watches the processes of a node's ranks, by its selector."""

    _node: Node
    _memory: Memory
    _mirrors: Mirrors
    _injections: FaultInjection
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
            own_state=self._memory.paths_for(slot.rank),
            buffers=self._memory.snapshots_of(slot.local_rank),
            snapshot_every_steps=config.verified_every or node.interval.steps or 0,
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
            trace=config.trace or "",
            verified=path_of(self._memory.verified[slot.local_rank]) if self._memory.verified else "",
            verified_every=0 if "rewind" in rungs else config.verified_every,
            verified_before=config.verifies_before,
            keep_steps=config.keep_steps or int(config.on_nan == "keep"),
            keeps_nan=config.on_nan == "keep",
            keep_steps_mib=config.keep_steps_mib,
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
        self.listen(slot)
        node.log("rank_started", rank=slot.rank, pid=slot.pid, is_replacement=is_replacement)
        was_ready, slot.had_to_wait = isinstance(handler, StandbyHandler) and not slot.had_to_wait, False
        node.report(RankStarted(at_s=time.monotonic(), rank=slot.rank, pid=slot.pid, had_standby=was_ready))
        if is_replacement:
            self._injections.forked(slot)

    def listen(self, slot: Process) -> None:
        """Hear what the process of a rank sends, and of its end."""
        selector, handler = self._node.selector, slot.handler
        selector.register(handler.channel.sock, selectors.EVENT_READ, lambda: self._on_message(slot, handler))
        selector.register(slot.pidfd, selectors.EVENT_READ, lambda: self._on_exit(slot))
        if slot.is_present:
            self._look_out_for_its_end(slot)

    def _on_message(self, slot: Process, handler: RankHandler) -> None:
        try:
            messages = handler.channel.read_available()
        except (EOFError, OSError):
            unwatch(self._node.selector, handler.channel.sock)
            if slot.handler is handler:
                slot.hung_up_at_s = time.monotonic()
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
                slot.is_dying = True
                self._on_end(slot, code)

        life_signs.watch(
            self._node.board,
            slot.rank,
            slot.pid,
            lambda code: self._node.call(lambda: on_dying(code)),
        )

    def _on_exit(self, slot: Process) -> None:
        """A process has been reaped; usually its exit was reported before."""
        self._node.selector.unregister(slot.pidfd)
        slot.kill()  # what it has started, as long as its number is its own
        handler = slot.handler
        if handler.proc.poll() is None:  # a debugger that is attached to it has to hear of it first
            self._node.in_background(lambda: take_code(handler), lambda _: self._on_gone(slot, handler))
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
        unwatch(self._node.selector, slot.handler.channel.sock)
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
                self.give_up(slot)

    def give_up(self, slot: Process) -> None:
        """Whatever becomes of a process that was killed, nobody waits for it."""
        self._undead.append(slot.handler)
        self.forget(slot)
        self._node.remove_left_files(slot.pid)

    def _on_end(self, slot: Process, code: int) -> None:
        node = self._node
        self._drain(slot)
        unwatch(node.selector, slot.handler.channel.sock)
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
                    slot.is_dying = True
                self._on_end(slot, code)
            elif not is_known:
                slot.is_dying = False  # its end itself will be reported
            elif pid is None and code is None and not slot.is_lost:
                node.report(RankStarted(at_s=time.monotonic(), rank=slot.rank, pid=slot.pid))

    def forget(self, slot: Process) -> None:
        if slot.handler is None:  # the group is ended before all of it was started
            return
        for watched in (slot.pidfd, slot.handler.channel.sock):
            unwatch(self._node.selector, watched)
        slot.forget_process()


def take_code(handler: RankHandler) -> None:
    """Wait for an exit code that the kernel holds back."""
    while handler.proc.poll() is None:
        time.sleep(_LOOK_AGAIN_S)


EVERY_S = 0.5
NO_STEP_S = 45.0  # after which it is said that there was no optimizer step: who trains without one must know


class UnhookedRanks:
    """Watches the processes of ranks in which no hook has spoken."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next_s = 0.0
        self._images: dict[int, str] = {}  # pid -> the program that has greeted
        self._reported: set[int] = set()  # pids
        self._suspects: dict[int, Reason] = {}  # pid -> why, if the rank should train there
        self._since_s: float | None = None  # when the run's first process has greeted; None: never, or it was said

    def note_present(self, slot: Process) -> None:
        """A process has greeted."""
        if not self._images:
            self._since_s = time.monotonic()
        self._images[slot.pid] = unhooked.image_of(slot.pid)

    def look(self) -> None:
        """Look if it is time to, and report what is certain. Costs nothing once all ranks have taken a step."""
        now = time.monotonic()
        if now < self._next_s or not self._node.is_python:
            return
        self._next_s = now + EVERY_S
        for slot in self._node.here:
            self._look_at(slot)
        if self._since_s is not None and not self._node.is_running:
            self._since_s = now  # it may be resuming
        if self._since_s is not None and now >= self._since_s + NO_STEP_S:
            self._since_s = None
            if not any(self._node.board.get(slot.rank, Field.APPLIED) for slot in self._node.here):
                why = Reason("no-step-yet", "no optimizer step so far")
                logger.warning(
                    "%s, after %.0f s: until there is one, nothing is saved, not even at a signal. If the script "
                    "trains without an optimizer of torch (weights by hand, another library), let it save by itself%s",
                    *(why, NO_STEP_S, why.pointer),
                )

    def settle(self) -> None:
        """A rank is lost: whoever may have trained unseen by then is taken to have done so."""
        for slot in self._node.here if self._node.is_python else ():
            self._look_at(slot)
            why = self._suspects.get(slot.pid)
            if why and not slot.is_protected:
                self._report(slot, why)

    def _look_at(self, slot: Process) -> None:
        if not slot.pid or slot.is_finished or slot.is_lost or slot.is_buried or slot.pid in self._reported:
            return
        if slot.hung_up_at_s is not None:
            if self._lives_on(slot, slot.hung_up_at_s):
                self._report(
                    slot,
                    Reason(
                        "hooks-missing",
                        "it has closed its connection to ttprun: it has replaced itself by another program (exec), or "
                        "has closed all of its file descriptors; start that program by ttprun (now it is "
                        f"{unhooked.command_of(slot.pid)})",
                    ),
                )
        elif not slot.is_present and not self._is_ours(slot):
            why = why_silent(slot.pid)
            if why:
                self._report(slot, why)
        elif slot.is_present and not slot.is_protected:
            self._look_for_children(slot)
        elif (
            slot.is_present
            and not self._node.board.get(slot.rank, Field.APPLIED)
            and (why := unhooked.why_in_ranks_of_its_own(slot.pid))
        ):
            self._report(slot, why)

    @staticmethod
    def _is_ours(slot: Process) -> bool:
        """It is bound to load our hooks: it comes from a standby, or one that was started alike has loaded them."""
        return isinstance(slot.handler, StandbyHandler) or slot.had_torch

    def _lives_on(self, slot: Process, hung_up_at_s: float) -> bool:
        """Whether a process that has closed its line is at something else; one that comes to its end closes it too."""
        image = unhooked.image_of(slot.pid)
        is_another = bool(image) and image != self._images.get(slot.pid, image)
        return is_another or self._node.board.get(slot.rank, Field.SEEN_NS) / 1e9 > hung_up_at_s

    def _look_for_children(self, slot: Process) -> None:
        why = unhooked.why_in_child(slot.pid)
        if why and slot.pid not in self._suspects:
            logger.warning("not protected: rank %d may train where no fault can be repaired: %s", slot.rank, why)
            self._node.log("rank_unseen", rank=slot.rank, reason=why)
        if why:
            self._suspects[slot.pid] = why
        else:
            self._suspects.pop(slot.pid, None)

    def _report(self, slot: Process, why: Reason) -> None:
        if slot.pid in self._reported:
            return
        self._reported.add(slot.pid)
        self._node.report(Said(slot.rank, slot.pid, RankUnprotected(why)))
