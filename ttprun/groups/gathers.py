"""Inputs of FSDP2's all-gathers that need no copy: the shards they are made of stay as they are until the step.

An input lies in the memory of the gathered parameters, which FSDP2 frees soon, so it cannot be kept itself. Nothing
writes to the shards before the optimizer steps, and the commit empties the journal before that. A script that does
write to them is seen: by copies of whole inputs in its first steps and then in turns, and by samples in each step, as
torch counts no version of a sharded parameter's memory. Its inputs are copied from then on; a fault in the very step in
which it is first seen is not repaired from these. Begin with `Gathers.hold`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from ttprun.groups.buckets import TRUSTED_AFTER, words_of
from ttprun.groups.entry import Input
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ttprun.groups.entry import Entry

_SAMPLES = 32  # of each shard
_LOOKS_EVERY = 64  # steps from one whole look at a shard to the next
_SHARD, _POINTER, _BYTES = attrgetter("_sharded_param_data"), methodcaller("data_ptr"), methodcaller("tobytes")


class Shards:
    """This rank's shards of the parameters that FSDP2 gathers together.

    held        flat, one of each parameter
    offset      so that whole looks at different shards come in different steps
    agreed      steps in which inputs were made of these, which nobody had changed when the optimizer stepped
    is_refused  inputs are made of something else, or the script changes the shards
    """

    def __init__(self, shards: list[torch.Tensor], offset: int) -> None:
        self.held = shards
        self.agreed = 0
        self._offset = offset
        # Other classes may gather what they like.
        self.is_refused = not all(
            type(shard) is torch.Tensor and shard.is_cpu and shard.is_contiguous() for shard in shards
        )
        self._pointers = list(map(_POINTER, shards))
        self._sampled = [] if self.is_refused else [words_of(shard, _SAMPLES) for shard in shards]

    @property
    def is_to_look_at(self) -> bool:
        """Whether inputs are copied in this step, to be compared as a whole."""
        return self.agreed < TRUSTED_AFTER or (self.agreed + self._offset) % _LOOKS_EVERY == 0

    def note(self) -> bytes:
        """Samples of them; b"" if their memory is another now."""
        return b"".join(map(_BYTES, self._sampled)) if list(map(_POINTER, self.held)) == self._pointers else b""

    def joined(self, dtype: torch.dtype) -> torch.Tensor:
        """[n] An input as FSDP2 makes it, on the CPU; n = elements of all shards."""
        sizes = [shard.numel() for shard in self.held]
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.empty(sum(sizes), dtype=dtype, device="cpu")
            torch._foreach_copy_(torch.split_with_sizes(joined, sizes), self.held)
        return joined

    def are_in(self, given: torch.Tensor) -> bool:
        """Whether an input is made of these."""
        size = sum(shard.numel() for shard in self.held)
        return given.shape == (size,) and torch.equal(self.joined(given.dtype), given)


@dataclass
class GatheredInput(Input):
    """An input that FSDP2 has made of shards. Its result is freed; gloo writes that when it has all of the input.

    dtype   of the input
    noted   samples of the shards when it was issued
    """

    shards: Shards
    dtype: torch.dtype
    noted: bytes

    def made_again(self) -> Sequence[torch.Tensor]:
        """The input once more. Raises NotRepairableError if the script has changed the shards."""
        if self.shards.note() != self.noted:
            raise NotRepairableError(
                Reason("input-lost", "a parameter was changed after it was gathered: what it was is therefore lost")
            )
        return [self.shards.joined(self.dtype)]


class Gathers:
    """What FSDP2 gathers over one process group."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Shards] = weakref.WeakKeyDictionary()  # by the first parameter
        self._noted: list[tuple[Entry, Shards, bytes]] = []  # since the newest boundary, also of those that are copied

    def hold(self, entry: Entry, given: torch.Tensor, parameters: Sequence[Any]) -> None:
        """Note an all-gather's input before it is issued, if it need not be copied.

        given        [n]  the input, any dtype, on the CPU
        parameters   of FSDP2's class for these, of whose shards it is to be made
        """
        try:
            own = list(map(_SHARD, parameters))
            shards = self._known.get(parameters[0])
            if shards is None or len(own) != len(shards.held) or not all(map(is_, own, shards.held)):
                shards = self._known[parameters[0]] = Shards(own, len(self._known))
        except (AttributeError, IndexError, TypeError):  # another version of torch
            return
        if shards.is_refused:
            return
        noted = shards.note()
        shards.is_refused = not noted
        self._noted.append((entry, shards, noted))
        if not (shards.is_refused or shards.is_to_look_at):
            entry.input = GatheredInput(shards, given.dtype, noted)

    def end_step(self) -> None:
        """The step is committed, nothing of it will be issued again."""
        now = {shards: shards.note() for _, shards, _ in self._noted}
        for entry, shards, noted in self._noted:
            is_same = now[shards] == noted
            is_same = is_same and all(map(shards.are_in, entry.input.tensors))
            shards.is_refused = shards.is_refused or not is_same
        for shards in now:
            shards.agreed += 1
        self._noted.clear()
