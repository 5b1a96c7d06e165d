"""The mirror (`--buddy`): what only this rank holds, kept in shared memory of the node, from which it is replaced.

After step N a thread copies weights and optimizer state into one of two slots, while the script computes the next
forward pass. Before step N+1 the gradients are copied there, too. So at each moment after that commit one of the slots
gives the state of a boundary at which the survivors may be: that of N as it was copied, that of N+1 by taking the
step again in the replacement, with the lost rank's weights, optimizer state, hyper-parameters, random states and
gradients. A rank that is killed before the copy is complete, or in the middle of the step, loses nothing either.

A step that depends on more than that cannot be taken again: then the copy is waited for after each step. Begin with
`Mirror.begin`, `Mirror.complete` and `load`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ttprun.protocol import from_rank
from ttprun.protocol.board import Board, Field
from ttprun.protocol.mirrors import NOTHING, SLOTS, Held, slot_of
from ttprun.rank.process.free_memory import free_bytes
from ttprun.rank.process.shared_memory import Memory
from ttprun.rank.weights import optimizer_registry, replicated, sharded
from ttprun.rank.weights.own_state import forms_of, held_now
from ttprun.rank.weights.post_step_weights import KeptWeights
from ttprun.rank.weights.reduced_parts import ReducedParts
from ttprun.rank.weights.replicated import NotRepairableError
from ttprun.rank.weights.sharded import local_of

if TYPE_CHECKING:
    from ttprun.rank.session import Session

_ALIGNED = 64  # bytes
_LENGTH_BYTES = 8  # of the header, at the beginning of a slot
_CELLS = (Field.MIRROR_0, Field.MIRROR_1)


class _Layout(NamedTuple):
    """Where things are in a slot.

    header      packed: what `_Slot.open` reads
    forms       of parameters and states for which it was made, see `own_state.held_now`
    state       offsets of weights and optimizer state, in the order of `replicated.describe`
    gradients   offset of each parameter's gradient
    before      offset of each parameter's weights before the next step, if the script may change them; else empty
    marks       offset of one byte a parameter: whether there is a gradient
    size        of the slot in bytes
    """

    header: bytes
    forms: list[tuple[Any, ...]]
    state: list[int]
    gradients: list[int]
    before: list[int]
    marks: int
    size: int


class _Slot:
    """One slot: its memory, and the tensors in it for one layout."""

    def __init__(self, path: str) -> None:
        self.memory = Memory(path)
        self._layout: _Layout | None = None
        self.state: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []
        self.marks = torch.empty(0)

    def lay_out(self, layout: _Layout, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Fit the memory to a layout, and take the tensors in it. Raises OSError."""
        if self._layout is layout:
            return
        self.state, self.gradients, self.before, self.marks = [], [], [], torch.empty(0)
        self.memory.fit(layout.size)
        self.memory.write(len(layout.header).to_bytes(_LENGTH_BYTES, "little") + layout.header)
        of_memory = self.memory.tensor
        self.state = [of_memory(at, one) for at, one in zip(layout.state, state, strict=True)]
        self.gradients = [of_memory(at, one) for at, one in zip(layout.gradients, weights, strict=True)]
        self.before = [of_memory(at, one) for at, one in zip(layout.before, weights, strict=False)]
        self.marks = of_memory(layout.marks, torch.empty(len(weights), dtype=torch.uint8))
        self._layout = layout


class Mirror:
    """Keeps this rank's mirror.

    paths      of the agent's memory, for each slot and for results of collectives; none: it is switched off
    is_wanted  this rank holds what no other one holds; set by the agent
    why_off    why nothing is kept any more; "" if it is
    """

    def __init__(self, board: Board, rank: int, paths: Sequence[str]) -> None:
        self._board = board
        self._rank = rank
        self._slots = [_Slot(path) for path in paths[:SLOTS]]
        self._parts = [ReducedParts(path) for path in paths[SLOTS:]]
        self.is_wanted = False
        self.why_off = "" if paths else "it is switched off"
        self._layout: _Layout | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._copying: Future[bool] | None = None
        self._why_no_step = ""
        self._has_reported = False

    @property
    def is_on(self) -> bool:
        """Whether the state is mirrored."""
        return self.is_wanted and not self.why_off

    def begin(self, session: Session, boundary: int) -> None:
        """The step to this boundary has ended: begin to copy the state. Raises nothing."""
        if not self.is_on:
            return
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttprun-mirror")
            self._copying = self._thread.submit(self._copy, session, boundary)
            if self._why_no_step:
                self._copying.result()
        except Exception as error:  # training continues
            self._give_up(session, boundary, error)

    def complete(self, session: Session, boundary: int, optimizer: torch.optim.Optimizer) -> None:
        """The step to this boundary is about to begin, and is recorded: keep its gradients, too. Raises nothing.

        boundary    to which the step leads; the mirror holds the state of the one before
        optimizer   that makes the step
        """
        if not self.is_on or self._copying is None:
            return
        try:
            is_state = self._copying.result()
            slot = self._slots[slot_of(boundary - 1)]
            self._why_no_step = self._why_no_step or _why_not_taken_again(optimizer)
            if is_state and not self._why_no_step and self._keep_step(slot, optimizer, session[KeptWeights].is_kept):
                self._note(Held(boundary - 1, has_state=True, has_step=True))
            if not self._has_reported:
                self._has_reported = True
                size = self._layout.size if self._layout else 0
                session.channel.send(from_rank.StateMirrored(boundary - 1, size, why_no_step=self._why_no_step))
        except Exception as error:
            self._give_up(session, boundary, error)

    def keep_result(self, session: Session, lane: str, number: int, result: torch.Tensor) -> None:
        """A reduce-scatter of FSDP2 has given this: the other ranks will drop what it was made of. Raises nothing.

        lane     of the journal's entry
        number   of the entry in its lane, since the boundary
        result   this rank's part, any dtype, shape and device; copied
        """
        if not self.is_on:
            return
        try:
            for parts in self._parts:
                parts.keep(session.applied, lane, number, result)
        except Exception as error:
            self._give_up(session, session.applied, error)

    def give_result(self, boundary: int, lane: str, number: int, target: torch.Tensor) -> None:
        """In a replacement: what a reduce-scatter had given to the lost rank.

        boundary       at which all ranks stand
        lane, number   as for `keep_result`
        target         written; of the same size in bytes as the result

        Raises NotRepairableError.
        """
        try:
            for parts in self._parts:
                parts.take(boundary, lane, number, target)
        except (LookupError, OSError, ValueError) as error:
            raise NotRepairableError(str(error)) from None
        if not self._parts:
            raise NotRepairableError("all ranks have dropped what a reduce-scatter was made of, and no mirror is kept")

    def end(self) -> None:
        """The run of the script is over: no copy is being made any more, and its tensors are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = self._copying = self._layout = None

    def _give_up(self, session: Session, boundary: int, error: Exception) -> None:
        self.why_off = str(error) or repr(error)
        for cell in _CELLS:
            self._board.set(self._rank, cell, NOTHING.pack())
        session.channel.send(from_rank.StateMirrored(boundary, why_not=self.why_off))

    def _note(self, held: Held) -> None:
        self._board.set(self._rank, _CELLS[slot_of(held.boundary)], held.pack())

    # The copies.

    def _copy(self, session: Session, boundary: int) -> bool:
        """On the thread: copy the state; returns whether nothing has changed it meanwhile."""
        count = _count()
        try:
            return self._copied(session, boundary)
        except Exception:
            if _count() == count:
                raise
            return False  # the script has added parameters meanwhile: the next copy has them

    def _copied(self, session: Session, boundary: int) -> bool:
        number = slot_of(boundary)
        slot = self._slots[number]
        self._board.set(self._rank, _CELLS[number], NOTHING.pack())
        kept = session[KeptWeights]
        if kept.why_not():
            return False
        with torch.no_grad():
            held = held_now()
            rows = list(replicated.rows())
            weights = [local_of(parameter) for _, parameter, *_ in rows]
            forms = forms_of(held)
            layout = self._layout
            if layout is None or layout.forms != forms or bool(layout.before) != kept.is_kept:
                layout = self._layout = _lay_out(rows, forms, kept.is_kept)
                self._check(layout.size, weights)
            state = [kept.of(value) if is_weight else local_of(value) for is_weight, value in _tensors(held)]
            slot.lay_out(layout, state, weights)
            torch._foreach_copy_(slot.state, state)
        if kept.why_not():
            return False
        self._note(Held(boundary, has_state=True, has_step=False))
        return True

    def _keep_step(self, slot: _Slot, optimizer: torch.optim.Optimizer, is_kept: bool) -> bool:
        """Copy the gradients, and the weights if the script changes them; returns whether that is all."""
        rows = list(replicated.rows())
        if bool(slot.before) != is_kept or len(rows) != len(slot.gradients):  # parameters were added since the copy
            return False
        marks, targets, found = [], [], []
        for at, (_, parameter, _, _, one) in enumerate(rows):
            gradient = parameter.grad if one is optimizer else None
            marks.append(gradient is not None)
            if gradient is None:
                continue
            local = local_of(gradient)
            if local.layout is not torch.strided or local.dtype != slot.gradients[at].dtype:
                self._why_no_step = "a gradient is sparse, or of another type than its parameter"
                return False
            if sharded.place_of(gradient) != sharded.place_of(parameter):
                self._why_no_step = "a gradient is sharded in another way than its parameter"
                return False
            targets.append(slot.gradients[at])
            found.append(local)
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, found)
            if is_kept:
                torch._foreach_copy_(slot.before, [local_of(parameter).detach() for _, parameter, *_ in rows])
            slot.marks.copy_(torch.tensor(marks, dtype=torch.uint8))
        return True

    def _check(self, size: int, weights: Sequence[torch.Tensor]) -> None:
        """Raises NotRepairableError, or MemoryError if there is no room for the slots of all ranks that have none."""
        layout = self._layout
        if layout is not None and any(type(value) is list for form in layout.forms for value in form):
            raise NotRepairableError("its optimizer keeps state in lists, which is not mirrored")
        if not all(weight.is_cpu for weight in weights):
            raise NotRepairableError("its parameters are on a device, from which they are not mirrored yet")
        without = sum(all(self._board.get(row, cell) == 0 for cell in _CELLS) for row in range(self._board.n_ranks))
        needed, free = len(self._slots) * size * without, free_bytes()
        if free is not None and needed > free:
            raise MemoryError(f"it takes {needed >> 20} MiB of shared memory, and only {free >> 20} MiB is free")


def _count() -> int:
    """How many parameters all optimizers have."""
    return sum(1 for _ in optimizer_registry.parameters())


def _why_not_taken_again(optimizer: torch.optim.Optimizer) -> str:
    """Why a step of this optimizer depends on more than is kept; "" if it does not."""
    if getattr(optimizer, "grad_scale", None) is not None:
        return "its optimizer takes the scale of its gradients from a GradScaler (fused=True)"
    return ""


def _tensors(held: list[tuple[tuple[Any, ...], torch.Tensor | None]]) -> list[tuple[bool, torch.Tensor]]:
    """(whether it is a parameter's weights, tensor), in the order of `replicated.describe`."""
    return [(isinstance(form[0], torch.Size), value) for form, value in held if value is not None]


def _lay_out(rows: list[replicated.Row], forms: list[tuple[Any, ...]], is_kept: bool) -> _Layout:
    """A layout for the tensors of these parameters. Raises NotRepairableError."""
    described, parts = replicated.describe()
    where = [part.place for part in parts]
    forms_held = [[str(part.tensor.dtype)[6:], list(part.tensor.shape), _chunk_of(part)] for part in parts]
    at = 0

    def place_for(size: int) -> int:
        nonlocal at
        found, at = at, at + -(-size // _ALIGNED) * _ALIGNED
        return found

    weights = [local_of(parameter) for _, parameter, *_ in rows]
    state = [place_for(part.tensor.nbytes) for part in parts]
    gradients = [place_for(weight.nbytes) for weight in weights]
    before = [place_for(weight.nbytes) for weight in weights] if is_kept else []
    marks = place_for(len(weights))
    content = {"header": described, "places": where, "state": state, "gradients": gradients, "before": before}
    content |= {"parameters": replicated.keys(), "keys": [part.key for part in parts], "forms": forms_held}
    # Offsets in the header are from its own end, as its length depends on them.
    header = json.dumps(content | {"marks": marks}).encode()
    start = -(-(_LENGTH_BYTES + len(header)) // _ALIGNED) * _ALIGNED

    def moved(offsets: list[int]) -> list[int]:
        return [start + offset for offset in offsets]

    return _Layout(header, forms, moved(state), moved(gradients), moved(before), start + marks, start + at)


def _chunk_of(part: replicated.Part) -> list[Any] | None:
    """Which part of the whole it is: [shape, offsets, sizes]; None: all of it, or one that no checkpoint can hold."""
    if sharded.why_not_stored([part.whole]):
        return None
    chunk = part.chunk
    return None if chunk is None else [list(chunk.shape), list(chunk.offsets), list(chunk.sizes)]


# In a replacement, or in a rank that saves what a lost one has left.


class Stored:
    """What a lost rank has left in a slot. Raises OSError, ValueError if it is something else."""

    def __init__(self, path: str) -> None:
        self._memory = Memory(path)
        self._memory.open()
        size = int.from_bytes(self._memory.read(0, _LENGTH_BYTES), "little")
        content = json.loads(self._memory.read(_LENGTH_BYTES, size))
        self._start = -(-(_LENGTH_BYTES + size) // _ALIGNED) * _ALIGNED
        self.header: list[Any] = content["header"]
        self.places: list[str | None] = content["places"]
        self.state: list[int] = content["state"]
        self.gradients: list[int] = content["gradients"]
        self.before: list[int] = content["before"]
        self._marks: int = content["marks"]
        self.parameters: list[str] = content["parameters"]
        self.keys: list[str] = content["keys"]
        self.forms: list[tuple[str, list[int], list[Any] | None]] = content["forms"]

    def tensor(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """What is at an offset, of the form of another tensor.

        like     gives dtype and shape
        offset   in bytes, as in `state`, `gradients` and `before`
        returns  a view of the slot's memory, on the CPU

        Raises ValueError if the slot is too small.
        """
        return self._memory.tensor(self._start + offset, like)

    def copy_to(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a tensor with what is at an offset.

        tensor   written; any dtype, shape and device
        offset   as for `tensor`
        """
        with torch.no_grad():
            tensor.copy_(self.tensor(tensor, offset))

    def has_gradient(self, number: int) -> bool:
        """Whether the parameter had a gradient in the step."""
        return bool(self._memory.read(self._start + self._marks + number, 1)[0])


def load(path: str) -> None:
    """Load the state that a lost rank has left in a slot. Raises NotRepairableError, OSError."""
    _load_state(Stored(path))
    sharded.forget_gathered()


def load_step(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Load the state before the step that a lost rank was about to take, with its gradients.

    Raises NotRepairableError, OSError.
    """
    stored = Stored(path)
    _load_state(stored)
    for number, (name, parameter, _, _, one) in enumerate(replicated.rows()):
        if stored.before:
            stored.copy_to(local_of(parameter.detach()), stored.before[number])
        if one is not optimizer:
            continue
        if not stored.has_gradient(number):
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.detach())
        gradient = parameter.grad
        if sharded.place_of(gradient) != sharded.place_of(parameter) or local_of(gradient).dtype != parameter.dtype:
            raise NotRepairableError(f"{name}: its gradient has another form than in the lost rank")
        stored.copy_to(local_of(gradient), stored.gradients[number])


def _load_state(stored: Stored) -> None:
    left = iter(zip(stored.places, stored.state, strict=True))

    def fill(key: str, tensor: torch.Tensor) -> None:
        theirs, offset = next(left)
        if (place := sharded.place_of(tensor)) != theirs:
            raise NotRepairableError(f"{key}: this rank's part is {place}, and the lost rank's was {theirs}")
        stored.copy_to(local_of(tensor), offset)

    replicated.take_over(stored.header, fill)
