"""The deadlines of a recovery's phases. Begin with `Deadlines.pass_time`.

They are for ranks that do nothing more: while all that are waited for still work, a deadline comes up to ten times as
late, and later on a busy machine, too. Only a job that a user or scheduler ends has no more time than was asked for.
"""

from __future__ import annotations

import time

from ttprun import recovery
from ttprun.agent.core.node import Node
from ttprun.agent.health.hang_detector import HangDetector
from ttprun.protocol.patience import MOST_TIMES, Patience


class Deadlines:
    """Those that the machine has asked for."""

    def __init__(self, node: Node, hang_detector: HangDetector) -> None:
        self._node = node
        self._hang_detector = hang_detector
        self._waiting: list[tuple[recovery.SetDeadline, Patience]] = []

    def set(self, order: recovery.SetDeadline) -> None:
        """Post DeadlinePassed when the time is over."""
        ending = self._node.job.ending
        is_urgent = ending is not None and not ending.is_fault
        self._waiting.append((order, Patience(order.after_s, is_scaled=not is_urgent)))

    def pass_time(self) -> None:
        """Post those that are over."""
        generation = self._node.job.generation
        self._waiting = [one for one in self._waiting if one[0].rank is not None or one[0].generation == generation]
        if not self._waiting:
            return
        times = MOST_TIMES if self._hang_detector.do_all_work(recovery.who_is_awaited(self._node.job)) else 1.0
        over = [waits for waits in self._waiting if waits[1].look(times)]
        for waits in over:
            self._waiting.remove(waits)
        for order, _ in over:
            is_current = order.rank is None and order.generation == self._node.job.generation
            silent = self._hang_detector.silent_ranks() if is_current else ()
            passed = recovery.DeadlinePassed(
                at_s=time.monotonic(), generation=order.generation, name=order.name, silent=silent, rank=order.rank
            )
            self._node.advance(passed)
