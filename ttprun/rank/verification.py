"""Two checks during training: are the replicated weights equal between ranks, and does a gradient hold a NaN?

Weights are compared every `verify_every` steps: they are copied before the step, and hashed by another thread while
training continues; the agent compares the hashes. At the first steps, and at those after a recovery, all trained
tensors are hashed before the step (holdings.py).

With `on_nan: stop`, a gradient is checked in the rank that computed it, while its all-reduce runs: afterwards the NaN
is in all ranks, and its origin is lost. Otherwise the results of the all-reduce are checked before the step.
Where a step is taken again on purpose, a debugger stops at the line that has made a NaN, too (`stop_at_next_line`).
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy
import torch
import xxhash

from ttprun.device.device_errors import in_one_line
from ttprun.groups.journal import Journal
from ttprun.introspect import fail_open, host_copies
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.tensor_bytes import FOLDED_FROM, bytes_of, comparable, elements_of, folded
from ttprun.protocol import from_rank
from ttprun.protocol.board import Phase
from ttprun.protocol.patience import Patience
from ttprun.tensors import holdings, optimizer_registry

if TYPE_CHECKING:
    from ttprun.groups.operations import Entry
    from ttprun.protocol.channel import Channel

# Look for NaN in reduced gradients: some elements at each step, all of them every WHOLE_EVERY steps.
#
# A NaN of one rank is in the result of all. Whether it is this rank's own is seen in the journal's copy of the input,
# if there is one. This serves `on_nan: warn`; `on_nan: stop` checks every input before the step (verification.py).

WHOLE_EVERY = 16  # boundaries
MOST_OPERATIONS = 16  # of a step, unless all are checked
SAMPLE = 1024  # elements of each result
_REDUCING = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
        *("reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    }
)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_NUMPY = {torch.float32: "f4", torch.float64: "f8"}


Found = tuple[str, bool]  # where in the step's results a NaN is, "" if there is none; whether this rank's input had it


def find_nan(journal: Journal, boundary: int, later: Callable[[Found], None] | None = None) -> Found | None:
    """Where in the step's results a NaN was found; nothing, too, if it is another rank's.

    For when the step's collectives have completed.

    later   called with the answer with the next `host_copies.take`, if results are on a device; None is returned then
    """
    with journal.lock:
        entries = [entry for entry in journal.entries if entry.op in _REDUCING and entry.is_done]
    is_whole = boundary % WHOLE_EVERY == 0
    if not is_whole and len(entries) > MOST_OPERATIONS:
        first = boundary * MOST_OPERATIONS % len(entries)
        entries = (entries[first:] + entries[:first])[:MOST_OPERATIONS]
    on_device = [
        (entry, output)
        for entry in entries
        for output in entry.outputs
        if not output.is_cpu and output.is_floating_point()
    ]
    if not on_device or later is None:
        return _first(journal, entries, boundary, is_whole)
    answer = later

    def look(sums: list[torch.Tensor]) -> None:
        with_nan = {id(entry) for (entry, _), total in zip(on_device, sums, strict=True) if math.isnan(total)}
        suspects = [
            entry for entry in entries if id(entry) in with_nan or all(output.is_cpu for output in entry.outputs)
        ]
        answer(_first(journal, suspects, boundary, is_whole))

    host_copies.later([_sampled(output, boundary, is_whole).sum().float() for _, output in on_device], look)
    return None


def _first(journal: Journal, entries: list[Entry], boundary: int, is_whole: bool) -> Found:
    """Of some entries, the first whose results have a NaN."""
    for entry in entries:
        if any(has_nan(output, boundary, is_whole) for output in entry.outputs):
            return _whose(journal, entry)
    return "", False


def _sampled(tensor: torch.Tensor, boundary: int, is_whole: bool) -> torch.Tensor:
    """The elements that are checked."""
    elements = elements_of(tensor.detach())
    stride = elements.numel() // SAMPLE
    if stride > 1 and not is_whole:
        return elements.reshape(-1)[boundary % stride :: stride] if elements.is_contiguous() else elements[:1]
    return elements


def has_nan(tensor: torch.Tensor, boundary: int, is_whole: bool) -> bool:
    """Whether an element is NaN.

    tensor     any dtype, shape and device; one that is not floating has none
    boundary   says which elements are the sample of a large tensor
    is_whole   check all elements instead
    """
    if not tensor.is_floating_point():
        return False
    dtype = _OF_NUMPY.get(tensor.dtype)
    is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0
    if dtype and is_plain and not is_whole:
        # Each of torch's operations takes longer than all of this: it is done for each bucket in each step.
        elements = numpy.frombuffer(bytes_of(tensor), dtype)
        stride = max(len(elements) // SAMPLE, 1)
        return bool(numpy.isnan(elements[boundary % stride :: stride]).any())
    sample = _sampled(tensor, boundary, is_whole)
    # The sum over infinities of both signs is NaN too, hence the second check.
    return math.isnan(sample.sum().item()) and bool(sample.isnan().any())


def _whose(journal: Journal, entry: Entry) -> Found:
    """See `find_nan`."""
    where = f"{entry.op} number {journal.entries.index(entry)} of the step"
    if not entry.input.tensors:
        return where, False
    for copy in entry.input.tensors:
        nans = int(elements_of(copy).isnan().sum())
        if nans:
            return f"{where}, {nans} of {copy.numel()} elements", True
    return "", False


PROOF_STEPS = 2  # steps after a recovery, before each of which all ranks report their hashes
_KILL_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 2.0  # for the agent to compare all ranks
_LOOK_AGAIN_S = 0.02


class Verifier:
    """Checks gradients and weights before each step, and reports to the agent.

    every         boundaries between two comparisons of weights, after the first ones; 0: none
    is_compared   weights are compared at all
    nan_limit_s   seconds for which a NaN in this rank's gradient blocks the step until the job ends; None: it is only
                  reported
    looks_before  each gradient is checked before it is reduced, not only the result
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
        self._asked_at = 0  # boundary of the newest full look, if the agent has not answered it
        self._is_answered = threading.Event()
        self._is_answer_awaited = True
        self._is_divergent = False
        self._verified_at = -1  # boundary after which a step was compared
        self._why_off = ""
        self._looked: tuple[int, Any] = (-1, lambda: None)  # newest full look: boundary, optimizer (weak)
        self._rows: list[tuple[str, bool]] = []  # of each copy: key of its parameter, whether it is the gradient
        self._copies: list[torch.Tensor] = []
        self._work: queue.Queue[int | None] = queue.Queue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def look(self, boundary: int, optimizer: torch.optim.Optimizer, frame: FrameType | None, are_new: bool) -> None:
        """The step that ends at the boundary is about to be taken.

        optimizer   about to take it
        frame       innermost one of the script, whose variables name the parameters
        are_new     the trained tensors have not been hashed twice

        Whether results on a device hold a NaN is known with the next `host_copies.take`, before the record counts.
        If a NaN must stop the job, this blocks until the agent has saved the state and kills the process; the other
        ranks wait for this rank's record meanwhile, so none takes the step. Raises RuntimeError after nan_limit_s.
        """
        if self.looks_before:
            finding: Found | None = (nan_in(self._journal), True)
        else:
            finding = find_nan(self._journal, boundary, partial(self._judge, boundary, optimizer))
        if finding is not None:
            self._judge(boundary, optimizer, finding)
        if not self._is_compared:
            return
        is_proof = boundary <= self._prove_until
        if is_proof and self._why_off:
            self._channel.send(from_rank.Note(f"{self._why_off}: at step {boundary} the recovery is not proved"))
        elif (is_proof or are_new or boundary == self._look_at) and not self._why_off:
            self._look_in_full(boundary, optimizer, frame)
        elif self._every and boundary % self._every == 0 and self._is_idle.is_set() and not self._why_off:
            self._begin_hash(boundary, optimizer)

    def _judge(self, boundary: int, optimizer: torch.optim.Optimizer, finding: Found) -> None:
        """Report a NaN that was not there at the boundary before. Blocks, and raises, as `look` says."""
        where, is_own = finding
        if where and not self._had_nan:
            if not self.looks_before:
                weights = (local_of(weight) for weight in optimizer_registry.parameters_of(optimizer))
                if any(has_nan(weight, boundary, True) for weight in weights):
                    where, is_own = f"{where}; the weights held it before this step", False
            self._channel.send(from_rank.NanFound(boundary - 1, where, is_own))
            if (session := current()) is not None and session.keeper is not None:
                session.keeper.write_nan()
            if self._nan_limit_s is not None:
                threading.Event().wait(self._nan_limit_s)
                why = (
                    f"NaN in this rank's own gradient in step {boundary - 1} ({where}), and ttprun's agent has not "
                    f"ended the job within {self._nan_limit_s:.0f} s (freeze_timeout_s + persist_timeout_s)"
                )
                raise fail_open.meant(RuntimeError(why))
        self._had_nan = bool(where)

    def _look_in_full(self, boundary: int, optimizer: torch.optim.Optimizer, frame: FrameType | None) -> None:
        """Report the hashes of all trained tensors before the commit, so that the agent knows them at a fault."""
        try:
            digests, names = holdings.in_full(optimizer), holdings.names(frame)
            shards, why_not_stored = holdings.shards()
        except Exception as error:
            fail_open.raise_if_meant(error)
            self._turn_off(error)
            return
        self._looked = boundary, weakref.ref(optimizer)
        session = current()
        groups = [] if session is None else [group.described() for group in session.made.living.values()]
        size = optimizer_registry.weights_bytes()
        self._is_answered.clear()
        self._asked_at = boundary
        self._channel.send(from_rank.Held(boundary, True, digests, names, shards, groups, why_not_stored, size))

    def look_again(self, boundary: int) -> None:
        """This rank's gradients have changed since it has reported the hashes before the step to this boundary."""
        at, optimizer = self._looked
        if at == boundary and (stepping := optimizer()) is not None:
            self._channel.send(from_rank.Held(boundary, True, holdings.in_full(stepping), {}, {}, [], ""))

    def note_compared(self, boundary: int, is_of_step: bool = False) -> None:
        """The agent has compared what all ranks hold before the step to this boundary, or the step that follows it."""
        if is_of_step:
            self._verified_at = boundary
        elif boundary == self._asked_at:
            self._is_answered.set()

    def await_answer(self) -> None:
        """After the step of a full look: wait until the agent has answered it.

        By its answer a rank mirrors what it alone holds, from that step on, and a snapshot holds it. Blocks for
        _ANSWER_LIMIT_S at most, or until a recovery begins; if no answer came in time (a rank has not taken this step),
        never again.
        """
        if self._asked_at and self._is_answer_awaited:
            self._is_answer_awaited = self._is_answered.wait(_ANSWER_LIMIT_S)
        self._asked_at = 0

    def stop_waiting(self) -> None:
        """A recovery begins: it waits for the end of the step, and the answer may never come."""
        self._is_answered.set()

    def await_verified(self, session: Rank, boundary: int) -> None:
        """Before the step that follows a boundary: wait until it is compared with what another process made of it.

        Blocks for commit_timeout_s at most, or until a recovery begins or the job ends. On several nodes, where no rank
        could go back behind the step any more, the agent gives up first.
        """
        patience = Patience(session.options.commit_timeout_s * (2 if session.options.verified_every else 1))
        while self._verified_at != boundary and not (session.is_holding or session.unprotected or patience.look()):
            if self._journal.is_ended:
                return
            session.touch(Phase.REPAIRING)
            time.sleep(_LOOK_AGAIN_S)

    def prove_from(self, boundary: int) -> None:
        """A recovery ends at this boundary: compare all hashes before each of the next steps.

        A difference between replacement and lost rank shows in the weights before the second step at the latest.
        """
        self._prove_until = boundary + PROOF_STEPS

    def look_at(self, boundary: int) -> None:
        """The agent requests all hashes at this boundary."""
        self._look_at = boundary

    def mark_divergent(self) -> None:
        """The agent has found that this rank's weights differ from its replicas'."""
        self._is_divergent = True

    def stop_if_divergent(self) -> None:
        """After a boundary: a divergent rank stops here, and the agent kills the process.

        Not during a step: completed collectives would contain this rank's inputs; its replacement would have other
        inputs and results than the others, and diverge too.
        """
        if self._is_divergent:
            self._is_divergent = False
            self._channel.send(from_rank.StoppedDivergent())
            threading.Event().wait(_KILL_LIMIT_S)

    def end(self, limit_s: float = 0.0) -> None:
        """The run of the script is over: end the thread, and wait `limit_s` at most for it."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)

    def _begin_hash(self, boundary: int, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights, and have the copies hashed while training continues."""
        try:
            rows = holdings.to_verify(optimizer)
            self._rows = [(key, is_gradient) for key, is_gradient, _ in rows]
            weights = [tensor.detach() for _, _, tensor in rows]
            if all(weight.is_cpu for weight in weights):
                self._hash_later(boundary, weights)
            else:  # of what is on a device, the sums
                weights = [
                    weight if weight.is_cpu or weight.nbytes < FOLDED_FROM else folded(weight) for weight in weights
                ]
                host_copies.later(weights, partial(self._hash_later, boundary))
        except Exception as error:  # e.g. no memory: training continues
            fail_open.raise_if_meant(error)
            self._turn_off(error)

    def _hash_later(self, boundary: int, weights: list[torch.Tensor]) -> None:
        """Copy into the buffers of the previous comparison, whose hashing is done, and begin the next one."""
        if [(copy.shape, copy.dtype) for copy in self._copies] != [(weight.shape, weight.dtype) for weight in weights]:
            self._copies = [torch.empty_like(weight, device="cpu", requires_grad=False) for weight in weights]
        for copy, weight in zip(self._copies, weights, strict=True):
            copy.copy_(weight)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work_off, name="ttprun-verification", daemon=True)
            self._thread.start()
        self._is_idle.clear()
        self._work.put(boundary)

    def _turn_off(self, error: Exception) -> None:
        """Report that weights are not compared any more, since this rank's are missing; training continues."""
        self._why_off = f"the weights of this rank cannot be hashed ({in_one_line(error)})"
        self._channel.send(from_rank.Note(f"{self._why_off}: from now on the ranks' weights are not compared"))

    def _work_off(self) -> None:
        while (boundary := self._work.get()) is not None:
            try:
                self._hash(boundary)
            except Exception as error:
                self._turn_off(error)
            self._is_idle.set()

    def _hash(self, boundary: int) -> None:
        digests: dict[str, tuple[str, str]] = {}
        for (key, is_gradient), copy in zip(self._rows, self._copies, strict=True):
            weights, gradient = digests.get(key, ("", ""))
            digest = xxhash.xxh3_64_hexdigest(bytes_of(copy))
            digests[key] = (weights, digest) if is_gradient else (digest, gradient)
        self._channel.send(from_rank.Held(boundary, False, digests, {}, {}, [], ""))


def nan_in(journal: Journal) -> str:
    """Which of the step's collectives has a NaN in this rank's input; "" if none."""
    with journal.lock:
        for entry in journal.entries:
            if entry.nan:
                return f"{entry.op} number {journal.entries.index(entry)} of the step, {entry.nan}"
    return ""


def stop_at_next_line(frame: FrameType | None, others: tuple[str, ...], debug: str, leave: Callable[[], None]) -> None:
    """Stop at the script's next line, as `to_rank.Replay.debug` says; not at once, as torch's modes are off in a hook.

    frame   of the caller
    others  beginnings of paths of files that are not the script's
    leave   called when the debugger is left with `quit`
    """

    def at_line(stopped: FrameType, event: str, argument: Any) -> Any:
        values = comparable(stopped.f_locals.values() if debug == "nan" else ())
        if event != "line" or (debug == "nan" and not any(bool(value.isnan().any()) for value in values)):
            return at_line
        sys.settrace(None)
        if debug in ("pdb", "nan"):
            import pdb  # not before: it imports what a script may have a file of the same name for

            debugger: Any = pdb.Pdb(nosigint=True)
            debugger.set_quit = leave
            debugger.set_trace(stopped)
            return debugger.trace_dispatch(stopped, event, argument)
        code = compile(Path(debug).read_text(encoding="utf-8"), debug, "exec")
        exec(code, stopped.f_globals, stopped.f_locals)  # in here Python takes over new values of variables
        return None

    def of_call(called: FrameType, *_: Any) -> Any:
        return at_line if debug == "nan" and not called.f_code.co_filename.startswith(others) else None

    while frame is not None:
        if not frame.f_code.co_filename.startswith(others):
            frame.f_trace = at_line
        frame = frame.f_back
    sys.settrace(of_call)
