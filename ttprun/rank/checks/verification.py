"""Two looks at the numbers while training goes well: are my weights still the others', and is my gradient a number?

Weights are compared between ranks every `verify_every` steps: they are copied before the step, which takes as long as a
copy does, and hashed on a thread of their own while training goes on; the agent compares. At the first steps, and at
those after a recovery, all that is trained is hashed before the step (holdings.py).

If a NaN is to stop the job, a gradient is looked at when the rank that made it has sent it off, while the ranks
exchange theirs and the journal's copy is still at hand: after the all-reduce a NaN is in all ranks, and nobody knows
whose. Else what has come out of the all-reduce is looked at before the step (reduced_gradients.py).
"""

from __future__ import annotations

import math
import queue
import threading
from types import FrameType
from typing import TYPE_CHECKING

import torch
import xxhash

from ttprun.device.errors import in_one_line
from ttprun.protocol import from_rank
from ttprun.rank import fail_open
from ttprun.rank.checks.reduced_gradients import find_nan, has_nan
from ttprun.rank.weights import holdings
from ttprun.rank.weights.sharded import local_of
from ttprun.rank.weights.tensor_bytes import bytes_of, elements_of

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel
    from ttprun.rank.comm.journal import Entry, Journal

PROOF_STEPS = 2  # behind a recovery, in front of which all ranks say what they hold
_KILL_LIMIT_S = 60.0


class Verifier:
    """Looks at gradients and weights in front of each step, and tells the agent.

    every         boundaries between two looks at the weights, beside the first ones; 0: none
    is_compared   what ranks hold is compared at all
    nan_limit_s   seconds for which a NaN in this rank's gradient keeps it from the step, till the job ends; None: it is
                  only told
    looks_before  at each gradient as this rank gives it, and not only at what all have made of them
    """

    def __init__(
        self, channel: Channel, journal: Journal, every: int, nan_limit_s: float | None, is_compared: bool = True
    ) -> None:
        self._is_compared = is_compared
        self._channel = channel
        self._journal = journal
        self._every = every
        self._nan_limit_s = nan_limit_s
        self.looks_before = nan_limit_s is not None
        self._had_nan = False
        self._prove_until = 0
        self._look_at = 0
        self._is_odd = False
        self._why_off = ""
        self._rows: list[tuple[str, bool]] = []  # of each copy: key of its parameter, whether it is the gradient
        self._copies: list[torch.Tensor] = []
        self._work: queue.Queue[int | None] = queue.Queue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def look(self, boundary: int, optimizer: torch.optim.Optimizer, frame: FrameType | None, are_new: bool) -> None:
        """The step behind which the boundary lies is about to be taken.

        optimizer   about to take it
        frame       innermost one of the script, whose variables name the parameters
        are_new     what is trained has not been looked at twice

        If there is a NaN that keeps the rank from the step, this blocks till the agent has saved what there is and ends
        the process; the other ranks wait for its record all the while, so that nobody takes the step. Raises
        RuntimeError if the agent does not come.
        """
        if self.looks_before:
            where, is_own = nan_in(self._journal), True
        else:
            where, is_own = find_nan(self._journal, boundary)
            held = (local_of(weight) for group in optimizer.param_groups for weight in group["params"])
            if where and not self._had_nan and any(has_nan(weight, boundary, True) for weight in held):
                where, is_own = f"{where}; the weights held it before this step", False
        if where and not self._had_nan:
            self._channel.send(from_rank.NanFound(boundary - 1, where, is_own))
            if self._nan_limit_s is not None:
                threading.Event().wait(self._nan_limit_s)
                found = RuntimeError(
                    f"NaN in this rank's own gradient in step {boundary - 1} ({where}), and ttprun's agent has not "
                    f"ended the job within {self._nan_limit_s:.0f} s (freeze_timeout_s + persist_timeout_s)"
                )
                raise fail_open.meant(found)
        self._had_nan = bool(where)
        if not self._is_compared:
            return
        is_proof = boundary <= self._prove_until
        if is_proof and self._why_off:
            self._note_not_proved(boundary, self._why_off)
        elif (is_proof or are_new or boundary == self._look_at) and not self._why_off:
            self._look_in_full(boundary, optimizer, frame)
        elif self._every and boundary % self._every == 0 and self._is_idle.is_set() and not self._why_off:
            self._begin_hash(boundary, optimizer)

    def _look_in_full(self, boundary: int, optimizer: torch.optim.Optimizer, frame: FrameType | None) -> None:
        """Report all that this rank trains, before it commits: at any later fault the agent knows it."""
        try:
            held, names = holdings.in_full(optimizer), holdings.names(frame)
        except Exception as error:
            self._turn_off(error)
            return
        self._channel.send(from_rank.Held(boundary, is_full=True, held=held, names=names))

    def prove_from(self, boundary: int) -> None:
        """A recovery ends at this boundary: look in front of the next steps, whether all are still alike.

        What a replacement does otherwise than the lost rank did shows in the weights before its second step at last.
        """
        self._prove_until = boundary + PROOF_STEPS

    def look_at(self, boundary: int) -> None:
        """The agent wants a full look at this boundary."""
        self._look_at = boundary

    def stand_aside(self) -> None:
        """The agent has found that this rank's weights are not the others'."""
        self._is_odd = True

    def step_aside_if_odd(self) -> None:
        """Behind a boundary: a rank that is odd stops here, and the agent ends its process.

        Not in the middle of a step: collectives that the others have completed would hold what this rank gave, its
        replacement would give something else, get other results than they, and diverge in its turn.
        """
        if self._is_odd:
            self._is_odd = False
            self._channel.send(from_rank.SteppedAside())
            threading.Event().wait(_KILL_LIMIT_S)

    def end(self, limit_s: float = 0.0) -> None:
        """The run of the script is over: the thread ends; it is waited for so long at most."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)

    def _note_not_proved(self, boundary: int, why: str) -> None:
        self._channel.send(from_rank.Note(f"{why}: at step {boundary} the recovery is not proved"))

    def _begin_hash(self, boundary: int, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights, and have the copies hashed while training goes on."""
        try:
            found = holdings.to_verify(optimizer)
            self._rows = [(key, is_gradient) for key, is_gradient, _ in found]
            self._copy([tensor for _, _, tensor in found])
            if self._thread is None:
                self._thread = threading.Thread(target=self._work_off, name="ttprun-verification", daemon=True)
                self._thread.start()
        except Exception as error:  # there may be no memory for it, which training must not feel
            self._turn_off(error)
            return
        self._is_idle.clear()
        self._work.put(boundary)

    def _turn_off(self, error: Exception) -> None:
        """This rank's weights are not compared any more, and so nobody's: that is told, and training goes on."""
        self._why_off = f"the weights of this rank cannot be hashed ({in_one_line(error)})"
        self._channel.send(from_rank.Note(f"{self._why_off}: from now on the ranks' weights are not compared"))

    def _copy(self, weights: list[torch.Tensor]) -> None:
        """Into the same buffers as before. While these are being hashed no look is taken: the agent can wait."""
        if [(copy.shape, copy.dtype) for copy in self._copies] != [(one.shape, one.dtype) for one in weights]:
            self._copies = [torch.empty_like(one, device="cpu", requires_grad=False) for one in weights]
        for copy, one in zip(self._copies, weights, strict=True):
            copy.copy_(one.detach())

    def _work_off(self) -> None:
        while (boundary := self._work.get()) is not None:
            try:
                self._hash(boundary)
            except Exception as error:
                self._turn_off(error)
            self._is_idle.set()

    def _hash(self, boundary: int) -> None:
        held: dict[str, tuple[str, str]] = {}
        for (key, is_gradient), copy in zip(self._rows, self._copies, strict=True):
            weights, gradient = held.get(key, ("", ""))
            digest = xxhash.xxh3_64_hexdigest(bytes_of(copy))
            held[key] = (weights, digest) if is_gradient else (digest, gradient)
        self._channel.send(from_rank.Held(boundary, is_full=False, held=held, names={}))


def look_for_nan(entry: Entry) -> None:
    """Note which of a collective's inputs has a NaN, now that it is on its way.

    One pass over the journal's copies, just made, or over the gradients that a bucket was made of.
    """
    if entry.held is not None:
        entry.nan = entry.held.told_nans()
        return
    for _, copy in entry.saved:
        found = nans_in(copy)
        if found:
            entry.nan = f"{found} of {copy.numel()} elements"
            return


def nans_in(tensor: torch.Tensor) -> int:
    """How many elements are NaN."""
    tensor = elements_of(tensor)
    # A sum is a NaN if an element is, and also over infinities of both signs: hence the second look.
    if tensor.is_floating_point() and math.isnan(tensor.sum().item()):
        return int(tensor.isnan().sum())
    return 0


def nan_in(journal: Journal) -> str:
    """Which of the step's collectives this rank has given a NaN; "" if none."""
    with journal.lock:
        for entry in journal.entries:
            if entry.nan:
                return f"{entry.op} number {journal.entries.index(entry)} of the step, {entry.nan}"
    return ""
