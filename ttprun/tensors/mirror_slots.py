"""A slot of a mirror: how a rank's tensors lie in it, written by the rank and read after its loss.

A header in JSON describes the state and says where each tensor begins; then come weights and optimizer state, the next
step's gradients, and one byte a parameter that says whether there is one. Begin with `Layout` and `Stored`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ttprun.introspect.distributed_tensors import local_of
from ttprun.protocol.mirrors import Held
from ttprun.tensors import replicated, sharded
from ttprun.tensors.memory import Memory

_ALIGNED = 64  # bytes
_LENGTH_BYTES = 8  # of the header, at the beginning of a slot


class Layout(NamedTuple):
    """Where things are in a slot.

    header      packed: what `Stored` reads
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


class Part(NamedTuple):
    """The newest part of a slot: all but the gradients of the next step, or these.

    held    what the slot holds with this part
    path    of the slot's memory
    at      offset in it, in bytes
    size    in bytes
    whole   of the slot, in bytes
    """

    held: Held
    path: str
    at: int
    size: int
    whole: int


class Slot:
    """One slot: its memory, and the tensors in it for one layout.

    split   offset at which the state ends, and what the next step needs begins
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.memory = Memory(path)
        self.release()

    def release(self) -> None:
        """Drop the tensors in it."""
        self._layout: Layout | None = None
        self.split = 0
        self.state: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []
        self.marks = torch.empty(0)

    def lay_out(self, layout: Layout, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Fit the memory to a layout, and take the tensors in it. Raises OSError."""
        if self._layout is layout:
            return
        self.release()
        self.memory.fit(layout.size)
        self.memory.write(len(layout.header).to_bytes(_LENGTH_BYTES, "little") + layout.header)
        of_memory = self.memory.tensor
        self.state = [of_memory(at, one) for at, one in zip(layout.state, state, strict=True)]
        self.gradients = [of_memory(at, one) for at, one in zip(layout.gradients, weights, strict=True)]
        self.before = [of_memory(at, one) for at, one in zip(layout.before, weights, strict=False)]
        self.marks = of_memory(layout.marks, torch.empty(len(weights), dtype=torch.uint8))
        self.split = layout.gradients[0]
        self._layout = layout

    def part(self, held: Held) -> Part:
        """The part with which it holds this; it has been laid out."""
        whole = self.memory.size
        at, end = (self.split, whole) if held.has_step else (0, self.split)
        return Part(held, self.path, at, end - at, whole)


def lay_out(rows: list[replicated.Row], forms: list[tuple[Any, ...]], is_kept: bool) -> Layout:
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

    return Layout(header, forms, moved(state), moved(gradients), moved(before), start + marks, start + at)


def _chunk_of(part: replicated.Part) -> list[Any] | None:
    """Which part of the whole it is: [shape, offsets, sizes]; None: all of it, or one that no checkpoint can hold."""
    if sharded.why_not_stored([part.whole]):
        return None
    chunk = part.chunk
    return None if chunk is None else [list(chunk.shape), list(chunk.offsets), list(chunk.sizes)]


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
