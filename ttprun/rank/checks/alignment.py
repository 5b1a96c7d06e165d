"""After a repair in which something was equal to rounding alone: the gradients of the next step become one rank's.

Survivors may have used the result of a collective that the others get anew, with the replacement's input in it. Whoever
still has such a result gives it (groups/reissue.py); where it is lost, the sums of those that had it and of those that
had not differ by rounding. No rank steps before all have recorded the boundary, so before it records, the replacement
asks the agent to have the gradients passed on: from a survivor to itself, and to survivors that had not got as far. The
weights are equal then, and so is all that the step makes of them.

The agent's orders are carried out by the recovery's thread: replay/repairing.py. Begin with `Alignment.arrive`.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from ttprun.groups.journal import EndedError, Journal
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.rank.checks.replay_guard import report_mismatch
from ttprun.rank.session import Session
from ttprun.tensors import optimizer_registry

_LOOK_AGAIN_S = 0.05
_LIMIT_S = 600.0  # longer than all that the agent waits for, which ends in another recovery


class Alignment:
    """From whom this rank takes gradients, and whether it must.

    source      rank whose results of the step count, by the newest order to resume; None: this rank's do too
    is_needed   this rank is a replacement, and something of its step was equal to the lost rank's to rounding alone
    """

    def __init__(self) -> None:
        self.source: int | None = None
        self.is_needed = False
        self._generation = -1  # of the order that has named the source
        self._stepping: tuple[int, Any] = (-1, None)  # boundary, optimizer (weak) about to step to it
        self._waits_at = -1
        self._last = -1  # boundary
        self._aligned_at = -1  # boundary

    def begin(self, session: Session, generation: int, source: int | None) -> None:
        """All resume; of the step the results of `source` count."""
        with session.changed:
            self.source, self._generation, self._aligned_at = source, generation, -1
            session.changed.notify_all()

    def note_aligned(self, session: Session, boundary: int) -> None:
        """All that were to take gradients of the step before this boundary have them."""
        with session.changed:
            self._aligned_at = boundary
            session.changed.notify_all()

    def arrive(self, session: Session, boundary: int, optimizer: Any) -> None:
        """The optimizer is about to step to the boundary, which is not recorded yet.

        Blocks a replacement that needs other gradients until it has them, through any number of recoveries. One
        backward pass may have made the gradients of several optimizers, which step one after the other.

        Raises EndedError if this process is ordered to end meanwhile, MismatchError if no answer has come in _LIMIT_S.
        """
        self._stepping = boundary, weakref.ref(optimizer)
        if not self.is_needed:
            return
        if self._last < 0:
            self._last = boundary + max(1, len(optimizer_registry.optimizers())) - 1
        if boundary > self._last:
            self.is_needed, self._last = False, -1
            return
        asked, asked_at_s = -1, time.monotonic()
        self._waits_at = boundary
        try:
            while self.source is not None and self._aligned_at < boundary and not session.unprotected:
                if session[Journal].is_ended:
                    raise EndedError
                session.touch(Phase.REPAIRING)
                if self._generation not in (asked, -1) and self._generation == session.generation:
                    asked, asked_at_s = self._generation, time.monotonic()
                    session.channel.send(from_rank.Unaligned(asked, boundary))
                with session.changed:
                    if self._aligned_at < boundary:
                        session.changed.wait(_LOOK_AGAIN_S)
                if time.monotonic() - asked_at_s > _LIMIT_S:
                    report_mismatch(
                        session.channel,
                        session.generation,
                        Reason(
                            "gradients-late",
                            f"the gradients of rank {self.source}, whose results count, have not come in "
                            f"{_LIMIT_S:.0f} s",
                        ),
                    )
        finally:
            self._waits_at = -1

    def optimizer_at(self, session: Session, boundary: int) -> Any:
        """The optimizer about to step to the boundary, if the main thread waits there; else None."""
        at, optimizer = self._stepping
        if at != boundary:
            return None
        has_recorded = session.board.get(session.rank, Field.RECORDED) >= boundary
        return optimizer() if has_recorded or self._waits_at == boundary else None
