"""Looks for ranks that use torch while no hook of ours has spoken in them, and says so: they are not protected.

A rank whose Python has loaded our `sitecustomize` mostly reports by itself (rank/unhooked.py). From outside are
found: a Python that has skipped it (-E, -I, -S, a wrapper), one that has taken the rank's place by exec, and training
in a child of the rank. Begin with `Unseen.look`.
"""

from __future__ import annotations

import logging
import time

from ttprun.agent.node import Node
from ttprun.agent.protection import Protection
from ttprun.agent.seat import Seat
from ttprun.rank.bootstrap import unhooked

logger = logging.getLogger("ttprun")

EVERY_S = 0.5
_AFTER_S = 1.0  # that long a state must last to be reported
_LEAVES_WITHIN_S = 0.3  # a process that ends closes its line, and is gone
_HUNG_UP = (
    "it has closed its connection to ttprun: it has replaced itself by another program (exec), or has closed all "
    "of its file descriptors; start that program by ttprun"
)
_IMPORT_LIMIT_S = 20.0  # a .pth file may import torch before our `sitecustomize` is run


class Unseen:
    """Watches the processes of ranks in which no hook has spoken."""

    def __init__(self, node: Node, protection: Protection) -> None:
        self._node = node
        self._protection = protection
        self._next_s = 0.0
        self._since: dict[tuple[int, str], float] = {}  # (pid, what was seen) -> when it was first
        self._reported: set[int] = set()  # pids
        self._suspects: dict[int, str] = {}  # pid -> why, if the rank should train there

    def look(self) -> None:
        """Look if it is time to, and report what is certain. Costs nothing once all ranks have been heard."""
        now = time.monotonic()
        if now < self._next_s or not self._node.is_python:
            return
        self._next_s = now + EVERY_S
        for seat in self._node.here:
            self._look_at(seat, now)

    def settle(self, lost: Seat) -> None:
        """A rank is lost: whoever may have trained unseen by then is taken to have done so."""
        now = time.monotonic()
        if lost.hung_up_at_s is not None and now - lost.hung_up_at_s > _LEAVES_WITHIN_S:
            self._report(lost, _HUNG_UP)
        for seat in self._node.here:
            why = self._suspects.get(seat.pid, "")
            if why and not seat.is_protected:
                self._report(seat, why)

    def _look_at(self, seat: Seat, now: float) -> None:
        if not seat.pid or seat.is_finished or seat.is_lost or seat.is_buried or seat.pid in self._reported:
            return
        if seat.hung_up_at_s is not None:
            if now - seat.hung_up_at_s > _AFTER_S:
                self._report(seat, f"{_HUNG_UP} (now it is {unhooked.command_of(seat.pid)})")
        elif not seat.is_protected and not seat.is_present:
            self._look_at_silent(seat, now)
        elif not seat.is_protected:
            why = unhooked.why_in_child(seat.pid)
            if why and seat.pid not in self._suspects and self._has_lasted(seat, "child", _AFTER_S, now):
                self._suspects[seat.pid] = why
                logger.warning("rank %d may train where no fault can be repaired: %s", seat.rank, why)
                self._node.log("rank_unseen", rank=seat.rank, reason=why)

    def _look_at_silent(self, seat: Seat, now: float) -> None:
        """One whose Python has not said hello."""
        if not unhooked.has_torch(seat.pid):
            return
        option = unhooked.why_skipped(unhooked.words_of(seat.pid))
        why = option or (
            f"it uses torch, and its Python ({unhooked.command_of(seat.pid)}) has not loaded ttprun's hooks: something "
            "has removed ttprun's folder from PYTHONPATH, or site-packages are switched off"
        )
        self._suspects[seat.pid] = why
        if self._has_lasted(seat, "silent", _AFTER_S if option else _IMPORT_LIMIT_S, now):
            self._report(seat, why)

    def _has_lasted(self, seat: Seat, what: str, for_s: float, now: float) -> bool:
        return now - self._since.setdefault((seat.pid, what), now) >= for_s

    def _report(self, seat: Seat, why: str) -> None:
        if seat.pid in self._reported:
            return
        self._reported.add(seat.pid)
        self._suspects.pop(seat.pid, None)
        self._protection.note_unprotected(seat, why)
