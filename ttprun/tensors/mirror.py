"""The mirror (`--buddy`): what only this rank holds, kept in shared memory of the node, from which it is replaced.

After step N a thread copies weights and optimizer state into one of two slots, while the script computes the next
forward pass. Before step N+1 the gradients are copied there, too. So at each moment after that commit one of the slots
gives the state of a boundary at which the survivors may be: that of N as it was copied, that of N+1 by taking the
step again in the replacement, with the lost rank's weights, optimizer state, hyper-parameters, random states and
gradients. A rank that is killed before the copy is complete, or in the middle of the step, loses nothing either.

A step that depends on more than that cannot be taken again: then the copy is waited for after each step. Begin with
`Mirror.begin`, `Mirror.complete` and `load`; how tensors lie in a slot is in mirror_slots.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from ttprun.device import accelerator
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.model_tensors import local_of
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Board, Field, SlotContent, slot_of, unpack_slot
from ttprun.protocol.reason import Reason
from ttprun.tensors import optimizer_registry, replicated, sharded
from ttprun.tensors.mirror_slots import Layout, Part, ReducedParts, Slot, Stored, held_now
from ttprun.tensors.replicated import PostStepWeights

if TYPE_CHECKING:
    from ttprun.introspect.current_rank import Rank

_CHEAP_S = 0.005  # of processor time: a copy that takes no longer is kept, however short the steps are
_LOOKED_AT = 8  # newest copies, and steps

_CELLS = (Field.MIRROR_0, Field.MIRROR_1)


class Mirror:
    """Keeps this rank's mirror.

    paths      of the agent's memory, for each slot and for results of collectives; none: it has kept nothing yet
    is_wanted  this rank holds what no other one holds, or has results that none has; by the agent's order
    why_off    why nothing is kept any more; "" if it is
    on_kept    called with each part that is complete, on the thread that has copied it
    """

    def __init__(self, board: Board, rank: int, paths: Sequence[str]) -> None:
        self._board = board
        self._rank = rank
        self._slots: list[Slot] = []
        self._parts: list[ReducedParts] = []
        self._use(paths)
        self._limit_bytes, self._limit_share = 0, 0.0
        self._too_large_bytes = 0  # as many would have been needed
        self._is_of_results = False
        self._took_s: tuple[float, ...] = ()  # of the newest copies
        self._steps_s: tuple[float, ...] = ()  # between the newest steps
        self._began_s = 0.0
        self.is_wanted = False
        self.why_off = ""
        self.on_kept: Callable[[Part], None] = lambda part: None
        self._failure: Exception | None = None  # in a collective: to be reported after the step
        self._layout: Layout | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._copying: Future[bool] | None = None
        self._why_no_step = ""
        self._has_reported = False

    @property
    def is_on(self) -> bool:
        """Whether the state is mirrored, or results are."""
        return self.is_wanted and not self.why_off and self._failure is None

    def want(self, order: to_rank.KeepMirror) -> None:
        """The agent orders a mirror: from the next step on."""
        if not self._slots:
            self._use(order.paths)
        self._limit_bytes, self._limit_share = order.limit_bytes, order.limit_share
        self._is_of_results = order.is_of_results
        self.is_wanted = True
        self._has_reported = False  # another agent may lead now, which has not heard of it

    def _use(self, paths: Sequence[str]) -> None:
        self._slots = [Slot(path) for path in paths[:SLOTS]]
        self._parts = [ReducedParts(path, self._check_size) for path in paths[SLOTS:]]

    def begin(self, session: Rank, boundary: int) -> None:
        """The step to this boundary has ended: begin to copy the state. Raises nothing."""
        if self._failure is not None and not self.why_off:
            self._give_up(session, boundary, self._failure)
        if not self.is_on or self._is_of_results:
            return
        before_s, self._began_s = self._began_s, time.monotonic()
        if before_s:
            self._steps_s = (*self._steps_s, self._began_s - before_s)[-_LOOKED_AT:]
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttprun-mirror")
            where = accelerator.current_index(), accelerator.mark()
            self._copying = self._thread.submit(self._copy, session, boundary, *where)
            if self._why_no_step:
                self._copying.result()
        except Exception as error:  # training continues
            self._give_up(session, boundary, error)

    def complete(self, session: Rank, boundary: int, optimizer: torch.optim.Optimizer) -> None:
        """The step to this boundary is about to begin, and is recorded: keep its gradients, too. Raises nothing.

        boundary    to which the step leads; the mirror holds the state of the one before
        optimizer   that makes the step
        """
        if not self.is_on or self._copying is None:
            return
        began_s = time.monotonic()
        try:
            is_state = self._copying.result()
            slot = self._slots[slot_of(boundary - 1)]
            if getattr(optimizer, "grad_scale", None) is not None:
                self._why_no_step = "its optimizer takes the scale of its gradients from a GradScaler (fused=True)"
            stepping = None if session.has_collective_steps else optimizer
            if is_state and not self._why_no_step and self._keep_step(slot, stepping, session[PostStepWeights].is_kept):
                self._note(SlotContent(boundary - 1, has_state=True, has_step=True))
            if accelerator.in_use() is not None:  # beside the device's work a copy costs what is waited for it here
                self._check_cost(time.monotonic() - began_s)
            if not self._has_reported:
                self._has_reported = True
                size = self._size_bytes()
                session.channel.send(
                    from_rank.StateMirrored(
                        boundary=boundary - 1, bytes=size, limit_bytes=self._limit_bytes, why_no_step=self._why_no_step
                    )
                )
        except Exception as error:
            if not session.diagnose(error).is_known:  # else the script meets its device's error in the step
                self._give_up(session, boundary, error)

    def keep_result(self, session: Rank, sequence: str, number: int, result: torch.Tensor) -> bool:
        """A reduce-scatter of FSDP has given this: the other ranks will drop what it was made of. Raises nothing.

        sequence   of the journal's entry
        number     of the entry in its sequence, since the boundary
        result     this rank's part, any dtype, shape and device; copied
        returns    whether it is kept
        """
        if not self.is_on:
            return False
        try:
            for parts in self._parts:
                parts.keep(session.applied, sequence, number, result)
        except Exception as error:
            self._failure = error
        return bool(self._parts) and self._failure is None

    def give_result(self, boundary: int, sequence: str, number: int, target: torch.Tensor) -> None:
        """What a reduce-scatter had given to this rank, or to the lost one in whose place it is.

        boundary           at which all ranks stand
        sequence, number   as for `keep_result`
        target             written; of the same size in bytes as the result

        Raises NotRepairableError.
        """
        try:
            for parts in self._parts:
                parts.take(boundary, sequence, number, target)
        except (LookupError, OSError, ValueError) as error:
            raise NotRepairableError(str(error)) from None
        if not self._parts:
            raise NotRepairableError(
                Reason(
                    "state-of-one-rank",
                    "all ranks have dropped what a reduce-scatter was made of, and no mirror is kept",
                )
            )

    def end(self) -> None:
        """The run of the script is over: no copy is being made any more, and its tensors are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = self._copying = self._layout = None

    def _give_up(self, session: Rank, boundary: int, error: Exception) -> None:
        """On the main thread, when no operation of the step runs any more: no mirror, and no memory for it."""
        self.why_off = str(error) or repr(error)
        self.end()
        for cell in _CELLS:
            self._board.set(self._rank, cell, EMPTY_SLOT.pack())
        for slot in self._slots:
            slot.release()
            slot.memory.release()
        for parts in self._parts:
            parts.release()
        size = self._too_large_bytes
        session.channel.send(
            from_rank.StateMirrored(boundary=boundary, bytes=size, limit_bytes=self._limit_bytes, why_not=self.why_off)
        )

    def _note(self, content: SlotContent) -> None:
        self._board.set(self._rank, _CELLS[slot_of(content.boundary)], content.pack())
        self.on_kept(self._part(content))

    def held(self, boundary: int) -> SlotContent:
        """What is kept of the state of a boundary, and of the step that follows; NOTHING if that is nothing."""
        content = unpack_slot(self._board.get(self._rank, _CELLS[slot_of(boundary)]))
        return content if content.boundary == boundary else EMPTY_SLOT

    def parts(self, content: SlotContent) -> list[Part]:
        """The parts that give a slot this content, in their order; between steps, on the main thread."""
        if content == EMPTY_SLOT:
            return []
        return [self._part(content._replace(has_step=False)), *([self._part(content)] if content.has_step else [])]

    def _part(self, content: SlotContent) -> Part:
        return self._slots[slot_of(content.boundary)].part(content)

    # The copies.

    def _copy(self, session: Rank, boundary: int, device: int | None, stepped: Any) -> bool:
        """On the thread: copy the state; returns whether nothing has changed it meanwhile.

        device, stepped   of the main thread: its device's number, and the event after the step
        """
        count = _count()
        try:
            accelerator.use(device)
            with accelerator.beside(stepped):
                return self._copied(session, boundary)
        except Exception as error:
            if _count() == count and not session.diagnose(error).is_known:
                raise
            # Parameters were added meanwhile: the next copy has them. Or the script meets this error of its device.
            return False

    def _copied(self, session: Rank, boundary: int) -> bool:
        number = slot_of(boundary)
        slot = self._slots[number]
        self._board.set(self._rank, _CELLS[number], EMPTY_SLOT.pack())
        kept = session[PostStepWeights]
        if kept.why_not():
            return False
        with torch.no_grad():
            layout, state = held_now(self._layout, kept, 1 + kept.is_kept)
            if not state:
                raise NotRepairableError(Reason("optimizer-state-unknown", "its optimizers have no parameters"))
            if len(state) != len(layout.state):
                return False  # a backward has shown meanwhile which gradients belong to the state
            self._layout = layout
            self._check_size(0)
            slot.lay_out(layout, state)
            began_s = time.thread_time()
            slot.copy(state)
        if accelerator.in_use() is None:
            self._check_cost(time.thread_time() - began_s)
        else:
            slot.memory.pin_more()
        if kept.why_not():
            return False
        self._note(SlotContent(boundary, has_state=True, has_step=False))
        return True

    def _keep_step(self, slot: Slot, optimizer: torch.optim.Optimizer | None, is_kept: bool) -> bool:
        """Copy the gradients, and the weights if the script changes them; returns whether that is all.

        optimizer   whose gradients are kept; None: those of all, as other optimizers may step after it
        """
        rows = list(replicated.rows())
        if bool(slot.before) != is_kept or len(rows) != len(slot.gradients):  # parameters were added since the copy
            return False
        marks, targets, sources = [], [], []
        for at, (_, parameter, _, _, owner) in enumerate(rows):
            gradient = parameter.grad if optimizer is None or owner is optimizer else None
            marks.append(gradient is not None)
            if gradient is None:
                continue
            local = local_of(gradient)
            if local.layout is not torch.strided or local.dtype != slot.gradients[at].dtype:
                self._why_no_step = "a gradient is sparse, or of another type than its parameter"
                return False
            if not sharded.are_cut_alike(gradient, parameter):
                self._why_no_step = "a gradient is sharded in another way than its parameter"
                return False
            targets.append(slot.gradients[at])
            sources.append(local)
        with torch.no_grad(), accelerator.beside(accelerator.mark()):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            if is_kept:
                before = [local_of(parameter).detach() for _, parameter, *_ in rows]
                torch._foreach_copy_(slot.before, before, non_blocking=True)
            accelerator.finish_here()
            slot.marks.copy_(torch.tensor(marks, dtype=torch.uint8))
        return True

    def _check_cost(self, took_s: float) -> None:
        """Raises NotRepairableError if all of the newest copies have taken a larger share of a step than they may.

        took_s   of the copy that was just made: processor time, on a device the time for which it was waited
        """
        self._took_s = (*self._took_s, took_s)[-_LOOKED_AT:]
        copy_s, step_s = min(self._took_s), min(self._steps_s, default=0.0)
        is_known = len(self._took_s) == len(self._steps_s) == _LOOKED_AT
        if self._limit_share and is_known and copy_s > max(_CHEAP_S, self._limit_share * step_s):
            times = f"a copy takes {copy_s * 1000:.0f} ms, and a step {step_s * 1000:.0f} ms"
            raise NotRepairableError(f"{times} (--buddy on: all the same)")

    def _size_bytes(self, more_results: int = 0) -> int:
        """That the mirror takes: its slots, and what operations have given to it, with so many bytes more."""
        slot = self._layout.size if self._layout else 0
        return SLOTS * slot + sum(parts.size for parts in self._parts) + more_results

    def _check_size(self, more_results: int) -> None:
        """Raises NotRepairableError if with so many bytes more it takes more than it may."""
        needed = self._size_bytes(more_results)
        if needed > self._limit_bytes:
            self._too_large_bytes = needed
            raise NotRepairableError("too little memory")


def _count() -> int:
    """How many parameters all optimizers have."""
    return sum(1 for _ in optimizer_registry.parameters())


def load(path: str) -> None:
    """Load the state that a lost rank has left in a slot. Raises NotRepairableError, OSError."""
    _load_state(Stored(path))
    sharded.forget_gathered()


def load_step(path: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Load the state before the step that a lost rank was about to take, with its gradients.

    optimizer   that takes the step; None: the gradients of all optimizers are there

    Raises NotRepairableError, OSError.
    """
    stored = Stored(path)
    _load_state(stored)
    for number, (name, parameter, _, _, owner) in enumerate(replicated.rows()):
        if stored.before:
            stored.copy_to(local_of(parameter.detach()), stored.before[number])
        if optimizer is not None and owner is not optimizer:
            continue
        if not stored.has_gradient(number):
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.detach())
        gradient = parameter.grad
        if not sharded.are_cut_alike(gradient, parameter) or local_of(gradient).dtype != parameter.dtype:
            raise NotRepairableError(
                Reason("sharding-unknown", f"{name}: its gradient has another form than in the lost rank")
            )
        stored.copy_to(local_of(gradient), stored.gradients[number])


def _load_state(stored: Stored) -> None:
    offsets = iter(stored.state)
    replicated.take_over_parts(
        *(stored.described, stored.places, "the lost rank's was"), lambda part: stored.copy_to(part, next(offsets))
    )
