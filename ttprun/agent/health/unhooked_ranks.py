"""Looks for ranks that use torch while no hook of ours has spoken in them, and says so: they are not protected.

A rank whose Python has loaded our `sitecustomize` mostly reports by itself (rank/unhooked.py). From outside are
found: a Python that has skipped it (-E, -I, -S, a wrapper), one that has taken the rank's place by exec, and training
in a child of the rank. Each is reported for what the process shows, never for how long it has been silent: on a busy
machine all are. Begin with `Unseen.look`.
"""

from __future__ import annotations

import logging
import os
import time

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import Seat
from ttprun.agent.health.protection import Protection
from ttprun.agent.processes.rank_processes import SHIM, StandbyHandler
from ttprun.protocol.board import Field
from ttprun.rank.bootstrap import unhooked

logger = logging.getLogger("ttprun")

EVERY_S = 0.5


class Unseen:
    """Watches the processes of ranks in which no hook has spoken."""

    def __init__(self, node: Node, protection: Protection) -> None:
        self._node = node
        self._protection = protection
        self._next_s = 0.0
        self._images: dict[int, str] = {}  # pid -> the program that has greeted
        self._reported: set[int] = set()  # pids
        self._suspects: dict[int, str] = {}  # pid -> why, if the rank should train there

    def note_present(self, seat: Seat) -> None:
        """A process has greeted."""
        self._images[seat.pid] = unhooked.image_of(seat.pid)

    def look(self) -> None:
        """Look if it is time to, and report what is certain. Costs nothing once all ranks have been heard."""
        now = time.monotonic()
        if now < self._next_s or not self._node.is_python:
            return
        self._next_s = now + EVERY_S
        for seat in self._node.here:
            self._look_at(seat)

    def settle(self) -> None:
        """A rank is lost: whoever may have trained unseen by then is taken to have done so."""
        for seat in self._node.here if self._node.is_python else ():
            self._look_at(seat)
            why = self._suspects.get(seat.pid, "")
            if why and not seat.is_protected:
                self._report(seat, why)

    def _look_at(self, seat: Seat) -> None:
        if not seat.pid or seat.is_finished or seat.is_lost or seat.is_buried or seat.pid in self._reported:
            return
        if seat.hung_up_at_s is not None:
            if self._lives_on(seat, seat.hung_up_at_s):
                self._report(
                    seat,
                    "it has closed its connection to ttprun: it has replaced itself by another program (exec), or has "
                    "closed all of its file descriptors; start that program by ttprun (now it is "
                    f"{unhooked.command_of(seat.pid)})",
                )
        elif not seat.is_present and not self._is_ours(seat):
            why = why_silent(seat.pid)
            if why:
                self._report(seat, why)
        elif seat.is_present and not seat.is_protected:
            self._look_for_children(seat)

    @staticmethod
    def _is_ours(seat: Seat) -> bool:
        """It is bound to load our hooks: it comes from a standby, or one that was started alike has loaded them."""
        return isinstance(seat.handler, StandbyHandler) or seat.had_torch

    def _lives_on(self, seat: Seat, hung_up_at_s: float) -> bool:
        """Whether a process that has closed its line is at something else; one that comes to its end closes it too."""
        image = unhooked.image_of(seat.pid)
        is_another = bool(image) and image != self._images.get(seat.pid, image)
        return is_another or self._node.board.get(seat.rank, Field.SEEN_NS) / 1e9 > hung_up_at_s

    def _look_for_children(self, seat: Seat) -> None:
        why = unhooked.why_in_child(seat.pid)
        if why and seat.pid not in self._suspects:
            logger.warning("rank %d may train where no fault can be repaired: %s", seat.rank, why)
            self._node.log("rank_unseen", rank=seat.rank, reason=why)
        if why:
            self._suspects[seat.pid] = why
        else:
            self._suspects.pop(seat.pid, None)

    def _report(self, seat: Seat, why: str) -> None:
        if seat.pid in self._reported:
            return
        self._reported.add(seat.pid)
        self._protection.note_unprotected(seat, why)


def why_silent(pid: int) -> str:
    """Why a process that uses torch will never load our hooks; "" if it still may."""
    if not unhooked.has_torch(pid):
        return ""
    option = unhooked.why_skipped(unhooked.words_of(pid))
    if option:
        return option
    is_cut_off = SHIM not in unhooked.environment_of(pid).get("PYTHONPATH", "").split(os.pathsep)
    if not is_cut_off and not unhooked.seems_to_train(pid):  # a .pth file may import torch before our `sitecustomize`
        return ""
    return (
        f"it uses torch, and its Python ({unhooked.command_of(pid)}) has not loaded ttprun's hooks: something has "
        "removed ttprun's folder from PYTHONPATH, or site-packages are switched off"
    )
