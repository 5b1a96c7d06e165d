"""Looks for ranks that use torch while no hook of ours has spoken in them, and says so: they are not protected.

A rank whose Python has loaded our `sitecustomize` mostly reports by itself (rank/bootstrap/unhooked.py). From outside
are found: a Python that has skipped it (-E, -I, -S, a wrapper), one that has taken the rank's place by exec, and
training in a child of the rank. Each is reported for what the process shows, never for how long it has been silent: on
a busy machine all are. Begin with `UnhookedRanks.look`.
"""

from __future__ import annotations

import logging
import os
import time

from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.agent.node.rank_processes import SHIM, StandbyHandler
from ttprun.protocol.board import Field
from ttprun.protocol.from_rank import RankUnprotected
from ttprun.protocol.node_messages import Said
from ttprun.protocol.reason import Reason
from ttprun.rank.bootstrap import unhooked

logger = logging.getLogger("ttprun")

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


def why_silent(pid: int) -> Reason:
    """Why a process that uses torch will never load our hooks; "" if it still may."""
    if not unhooked.has_torch(pid):
        return Reason()
    option = unhooked.why_skipped(unhooked.words_of(pid))
    if option:
        return option
    is_cut_off = SHIM not in unhooked.environment_of(pid).get("PYTHONPATH", "").split(os.pathsep)
    if not is_cut_off and not unhooked.seems_to_train(pid):  # a .pth file may import torch before our `sitecustomize`
        return Reason()
    return Reason(
        "hooks-missing",
        f"it uses torch, and its Python ({unhooked.command_of(pid)}) has not loaded ttprun's hooks: something has "
        "removed ttprun's folder from PYTHONPATH, or site-packages are switched off",
    )
