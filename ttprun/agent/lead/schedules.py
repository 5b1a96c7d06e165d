"""When the next snapshot is due, and when all ranks are made to quiesce for a checkpoint.

What the script may go backward through is in no record (see `open_boundaries`), so a checkpoint of an open
boundary is mostly refused by the launch that should go on from it. The ranks then train on up to the next one that is
not open, if there is such a one before long; the first rank does not go past it. Begin with `SnapshotTimes.is_due` and
`QuiesceSchedule.ask`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ttprun import recovery
from ttprun.agent.lead.rows import Lead
from ttprun.protocol.board import LEADER, Field
from ttprun.state.cost_limits import best_interval_s

_OFTEN_S = 2.0  # at least, between two that are the only source of a lost rank's state
_OFTEN_SHARE = 0.01  # of the training's time, which they may take


class SnapshotTimes:
    """The times of snapshots, as `snapshot_every` asks for them; with `auto` they depend on cost and faults.

    is_off      none is taken, or none any more
    why_off     why; "": the user wants none, or that was reported
    is_wanted   the next one is due at once, whatever the interval is
    cost_s      what the newest one took
    """

    def __init__(self, node: Lead) -> None:
        self._node = node
        self._interval = node.interval
        self._verified_every = node.config.verified_every if "rewind" in node.config.rungs else 0
        self.is_off = node.interval.is_never and not self._verified_every
        self.why_off = ""
        self.is_wanted = False
        self.cost_s = 0.0
        self._began_s = self._last_s = time.monotonic()
        self._written_s = -math.inf

    def begin_anew(self) -> None:
        """All ranks are new."""
        self._last_s = time.monotonic()
        self.is_wanted = False

    def take_one_at_once(self) -> None:
        """Some rank holds what no other one does: with `auto` the first snapshot is not put off."""
        if self._interval.is_auto:
            self.is_wanted = True

    def note_taken(self) -> None:
        """One has been taken, or could not be."""
        self._last_s = time.monotonic()

    def is_due(self, ahead_s: float = 0.0) -> bool:
        """Whether the next one is to be taken now, or in so many seconds."""
        if self.is_wanted:
            return True
        if self._verified_every or self._interval.steps is not None:
            return True  # the ranks themselves count the steps
        now = time.monotonic()
        wanted_s = self._wanted_s(now)
        if self._is_only_source:
            wanted_s = min(wanted_s, self._often_s)
        return now - self._last_s >= wanted_s - ahead_s

    @property
    def _often_s(self) -> float:
        """Seconds between two that are the only source of a lost rank's state."""
        return max(_OFTEN_S, self.cost_s / _OFTEN_SHARE)

    @property
    def most_lost(self) -> str:
        """How much work a lost rank costs at most that has no other source; "" if the user has set the interval."""
        if not self._interval.is_auto:
            return ""
        return f"at most some {self._often_s:.0f} s of work (a snapshot takes {self.cost_s * 1000:.0f} ms)"

    def is_due_on_disk(self) -> bool:
        """Whether the one that has just been taken is to be written to disk."""
        if self._interval.is_never:
            return False  # it was taken for --verify-steps alone
        is_rare = not (self._is_only_source or self._verified_every)
        return is_rare or self._last_s - self._written_s >= self._wanted_s(self._last_s)

    def note_written(self) -> None:
        """The newest one is written to disk."""
        self._written_s = self._last_s

    def _wanted_s(self, now: float) -> float:
        """Seconds between two that are written to disk."""
        if self._interval.seconds is not None:
            return self._interval.seconds
        return best_interval_s(self.cost_s, now - self._began_s, self._node.job.incident_count)

    @property
    def _is_only_source(self) -> bool:
        """With `auto`, where a lost rank can only come from a snapshot: then they are taken often."""
        job = self._node.job
        has_no_peer = job.replicas.needs_snapshots
        if len(self._node.slots) == 1:  # what it keeps of itself is newer, if it keeps anything
            has_no_peer = not any(self._node.board.get(LEADER, Field.OWN_STATE + place) for place in (0, 1))
        return self._interval.is_auto and has_no_peer


LIMIT_S = 10.0  # whoever ends a job by a signal mostly leaves it 30 s


class QuiesceSchedule:
    """Orders to quiesce that are held back."""

    def __init__(self, node: Lead) -> None:
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
        if not node.slots or recovery.why_not_saved(node.job):
            return False
        open_at = node.board.get(LEADER, Field.OPEN_AT)
        return open_at > 0 and open_at >= node.board.get(LEADER, Field.APPLIED)

    def _inform_leader(self, is_asked: bool) -> None:
        self._is_leader_informed = is_asked
        if self._node.slots:
            self._node.board.set(LEADER, Field.QUIESCE_ASKED, int(is_asked))
