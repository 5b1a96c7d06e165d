"""Watching the standbys: when they are started, what they send, and their end. Begin with `StandbyWatch.look`."""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable
from functools import partial

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.processes.preloads import Preloaded
from ttprun.agent.processes.rank_processes import Standby, kill_session
from ttprun.agent.processes.standbys import Standbys
from ttprun.protocol.standby_messages import Imported, Ready, Report, WarmUp

PART = "standbys"
LATE_S = 30.0  # from their start; on a quiet machine they are ready long before
STEPLESS_S = 60.0  # from a rank's import of torch; most first steps are done by then

logger = logging.getLogger("ttprun")


class StandbyWatch:
    """Watches a node's standbys, by its selector."""

    def __init__(self, node: Node, standbys: Standbys) -> None:
        self._node = node
        self._standbys = standbys
        self._protected_at_s = 0.0
        self._is_due = False  # all were ended, for something of them had failed
        self._late_at_s = 0.0  # a line says what there is by then
        self._is_announced = self._is_absence_said = False

    def refill(self) -> None:
        """Start the standbys that are missing; without one a lost rank gets a new process."""
        if not self._standbys.may_start:
            return
        try:
            self._standbys.refill(self._watch, self._node.here[0].handler.start["env"])
        except OSError as error:
            self._node.log("standby_failed", reason=str(error))

    def prepare(self) -> None:
        """This node has no ranks yet, but may have some at any moment: a spare."""
        self._standbys.may_start = True
        try:
            self._standbys.refill(self._watch, {})
            self._standbys.hurry()  # it disturbs nobody here
        except OSError as error:
            self._node.log("standby_failed", reason=str(error))

    def start(self) -> None:
        """The ranks have done their first step, or are not about to: the standbys' imports no longer disturb them.

        Not in an incident, after which the standbys are refilled anyway.
        """
        self._standbys.may_start = True
        if self._node.job.incident is None:
            self.refill()

    def take(self, slot: RankSlot, message: Report) -> None:
        """A rank reports what standbys can do as well."""
        match message:
            case WarmUp(modules=modules, files=files):
                self._standbys.warm_up(modules, files)
                if self._node.peers.pool is not None:
                    self._node.peers.pool.warm_up(message)
                self.start()
            case Imported():
                started = [other.handler.start for other in self._node.here]
                self._standbys.preloads.note(slot.local_rank, message, started)
            case Ready():
                """It was needed before it was ready."""

    def look(self) -> None:
        """Start the standbys of ranks that take no step for long: by hand, not at all, or after a long set-up."""
        if self._node.job.incident is None:
            if self._is_due:
                self._is_due = False
                self.refill()
            self._standbys.look(self._watch_preloaded)
            self._announce()
        if self._standbys.may_start or not all(slot.is_protected for slot in self._node.here):
            return
        if self._protected_at_s == 0.0:
            self._protected_at_s = time.monotonic()
        elif time.monotonic() - self._protected_at_s > STEPLESS_S:
            self.start()

    def _announce(self) -> None:
        """Say once that a standby is ready, and before it, if that takes long, what a lost rank costs meanwhile."""
        if self._is_announced or not (self._standbys.may_start and self._standbys.is_wanted):
            return
        now = time.monotonic()
        is_late = 0.0 < self._late_at_s < now
        if self._node.peers.node:  # each node has its own; the first one speaks
            self._is_announced = True
        elif self._standbys.is_complete or (is_late and self._standbys.ready):
            self._is_announced = True
            what = "a lost rank is now replaced in about a second"
            logger.warning("standby ready (%s): %s", self._standbys.state.removeprefix("ready, "), what)
        elif not self._late_at_s:
            self._late_at_s = now + LATE_S
        elif is_late and not self._is_absence_said:
            self._is_absence_said = True
            import_s = max(slot.import_s for slot in self._node.here)
            logger.warning(
                "no standby is ready yet: until one is, a lost rank's new process imports torch first (%.0f s at the "
                "start of this job), and then what the script imports",
                import_s,
            )

    def begin_anew(self) -> None:
        """Something of them has failed: end all, so that the next ones owe nothing to what these have become."""
        self._is_due = True
        for standby in self._standbys.give_up():
            with contextlib.suppress(KeyError, ValueError):
                self._node.selector.unregister(standby.channel.sock)
            kill_session(standby.process.pid)
            self._node.in_background(standby.bury, failed=partial(self._node.domains.note, PART))

    def _listen(self, standby: Standby, on_message: Callable[[], None]) -> None:
        sock, node = standby.channel.sock, self._node

        def give_up() -> None:  # what it has sent would be read again and again
            with contextlib.suppress(KeyError, ValueError):
                node.selector.unregister(sock)

        node.selector.register(sock, selectors.EVENT_READ, lambda: node.domains.run(PART, on_message, give_up))

    def _watch_preloaded(self, preloaded: Preloaded) -> None:
        node, preloads, began_s = self._node, self._standbys.preloads, time.monotonic()

        def on_message() -> None:
            try:
                preloaded.read()
            except (EOFError, OSError):
                with contextlib.suppress(KeyError, ValueError):
                    node.selector.unregister(preloaded.channel.sock)
                preloads.lost(preloaded)
                node.in_background(preloaded.bury, failed=partial(node.domains.note, PART))
                return
            is_usable = preloads.came(preloaded)
            fields = {"is_usable": is_usable, "refused": preloaded.refused or preloads.refused}
            node.log("standby_preloaded", pid=preloaded.process.pid, took_s=time.monotonic() - began_s, **fields)

        self._listen(preloaded, on_message)

    def _watch(self, standby: Standby) -> None:
        node = self._node

        def on_message() -> None:
            try:
                standby.read()
            except (EOFError, OSError):
                with contextlib.suppress(KeyError, ValueError):
                    node.selector.unregister(standby.channel.sock)
                node.log("standby_lost", pid=standby.process.pid, was_ready=standby.has_started)
                node.in_background(standby.bury, failed=partial(node.domains.note, PART))
                if not standby.is_ready:
                    self._standbys.forget_warmth()
                if standby.has_started:  # one that could not start would not start the next time either
                    self.refill()

        self._listen(standby, on_message)
