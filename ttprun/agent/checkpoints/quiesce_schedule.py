"""When all ranks are made to quiesce for a checkpoint: at a boundary from which a run can resume, if one comes soon.

What the script may go backward through is in no record (see `open_boundaries`), so a checkpoint of an open
boundary is mostly refused by the launch that should go on from it. The ranks then train on up to the next one that is
not open, if there is such a one before long; the first rank does not go past it. Begin with `QuiesceSchedule.ask`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ttprun import recovery
from ttprun.agent.core.node import Node
from ttprun.protocol.board import LEADER, Field

LIMIT_S = 10.0  # whoever ends a job by a signal mostly leaves it 30 s


class QuiesceSchedule:
    """Orders to quiesce that are held back."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._orders: list[tuple[Callable[[], None], bool]] = []
        self._ends_s = 0.0
        self._is_leader_informed = False

    def ask(self, order: Callable[[], None], is_end: bool) -> None:
        """Give the order once the ranks stand well, at once as a rule, LIMIT_S after the first that waits in any case.

        is_end   the job ends by it: it does not wait for the end of a repair
        """
        if not self._orders:
            self._ends_s = time.monotonic() + LIMIT_S
        self._orders.append((order, is_end))
        self._inform_leader(True)
        self.look()

    def look(self) -> None:
        """Give the orders that need not wait any more.

        The first rank is held back until it has heard of the order: it may go on when the job runs again.
        """
        is_running = self._node.job.phase is recovery.JobPhase.RUNNING
        if not self._orders:
            if is_running and self._is_leader_informed:
                self._inform_leader(False)
            return
        if is_running and self._may_come() and time.monotonic() < self._ends_s:
            return
        due = [order for order, is_end in self._orders if is_end or is_running]
        self._orders = [(order, is_end) for order, is_end in self._orders if not is_end and not is_running]
        for order in due:
            order()

    def _may_come(self) -> bool:
        """The ranks stand at an open boundary, or are on their way past one; the next may be another one."""
        node = self._node
        if not node.slots or not recovery.may_persist(node.job):
            return False
        open_at = node.board.get(LEADER, Field.OPEN_AT)
        return open_at > 0 and open_at >= node.board.get(LEADER, Field.APPLIED)

    def _inform_leader(self, is_asked: bool) -> None:
        self._is_leader_informed = is_asked
        if self._node.slots:
            self._node.board.set(LEADER, Field.QUIESCE_ASKED, int(is_asked))
