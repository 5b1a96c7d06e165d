"""The deadlines of a recovery's phases. Begin with `Deadlines.pass_time`.

They are for ranks that do nothing more: while all that are waited for still work, a deadline comes up to ten times as
late, and later on a busy machine, too. Only a job that a user or scheduler ends has no more time than was asked for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ttprun import recovery
from ttprun.agent.core.node import Node
from ttprun.agent.health.hang_detector import HangDetector
from ttprun.protocol.patience import MOST_TIMES, Patience

logger = logging.getLogger("ttprun")
SAY_AFTER_S = 15.0


@dataclass
class _Wait:
    """One deadline: its order, when it was given, and how much of it is left."""

    order: recovery.SetDeadline
    patience: Patience
    since_s: float
    is_said: bool = False


class Deadlines:
    """Those that the machine has asked for."""

    def __init__(self, node: Node, hang_detector: HangDetector) -> None:
        self._node = node
        self._hang_detector = hang_detector
        self._waits: list[_Wait] = []

    def set(self, order: recovery.SetDeadline) -> None:
        """Post DeadlinePassed when the time is over."""
        ending = self._node.job.ending
        is_urgent = ending is not None and not ending.is_fault
        patience = Patience(order.after_s, is_scaled=not is_urgent)
        self._waits.append(_Wait(order, patience, time.monotonic()))

    def pass_time(self) -> None:
        """Post those that are over, and tell the console of those that take long."""
        job = self._node.job
        self._waits = [wait for wait in self._waits if wait.order.rank is not None or self._is_current(wait.order)]
        if not self._waits:
            return
        times = MOST_TIMES if self._hang_detector.do_all_work(recovery.who_is_awaited(job)) else 1.0
        over = [wait for wait in self._waits if wait.patience.look(times)]
        for wait in over:
            self._waits.remove(wait)
        self._say()
        for order in (wait.order for wait in over):
            is_current = order.rank is None and self._is_current(order)
            silent = self._hang_detector.silent_ranks() if is_current else ()
            passed = recovery.DeadlinePassed(
                at_s=time.monotonic(), generation=order.generation, name=order.name, silent=silent, rank=order.rank
            )
            self._node.advance(passed)

    def _is_current(self, order: recovery.SetDeadline) -> bool:
        return order.generation == self._node.job.generation

    def _say(self) -> None:
        """Say once of each wait that takes long for whom it is; of a phase that is over the deadline says nothing."""
        job = self._node.job
        for wait in self._waits:
            is_of_phase = wait.order.rank is None and wait.since_s >= job.phase_since_s
            if wait.is_said or not is_of_phase or time.monotonic() - wait.since_s < SAY_AFTER_S:
                continue
            wait.is_said = True
            missing = recovery.missing_from(job)
            if missing:
                logger.warning("still waiting for %s (limit: %.0f s without progress)", missing, wait.order.after_s)
