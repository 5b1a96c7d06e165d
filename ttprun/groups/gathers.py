"""Inputs of FSDP's all-gathers that need no copy: the shards they are made of stay as they are until the step.

An input of FSDP2 lies in memory of the gathered parameters, which it frees soon, so it cannot be kept itself. Nothing
writes to the shards before the optimizer steps, and the commit empties the journal before that. A script that does
write to them is seen: as a whole in its first steps and then in turns, and by samples in each step, as torch counts no
version of a sharded parameter's memory. Its inputs are copied from then on; a fault in the very step in which it is
first seen is not repaired from these.

On the CPU a look as a whole compares a copy of the input. On a device, where that would take as much memory as the
shards, the input is compared when it is issued, and sums of all words again at the commit; the host reads what has come
of it with what it copies at the next boundary, and waits for nothing here. Begin with `Gathers.hold`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from ttprun.device import accelerator
from ttprun.groups.inputs import TRUSTED_AFTER, WORDS, refuse_later, words_of
from ttprun.groups.operations import Input
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    from ttprun.groups.operations import Entry

_SAMPLES = 32  # of each shard
_LOOKS_EVERY = 64  # steps from one whole look at a shard to the next
_SHARD, _OF_FSDP1 = attrgetter("_sharded_param_data"), attrgetter("flat_param._local_shard")
_POINTER, _BYTES = methodcaller("data_ptr"), methodcaller("tobytes")

Note = bytes | torch.Tensor


class Shards:
    """This rank's shards of the parameters that FSDP2 gathers together.

    held        flat, one of each parameter
    offset      so that whole looks at different shards come in different steps
    agreed      steps in which inputs were made of these, which nobody had changed when the optimizer stepped
    is_refused  inputs are made of something else, or the script changes the shards
    is_on_host  they are on the CPU
    """

    def __init__(self, shards: list[torch.Tensor], offset: int) -> None:
        self.held = shards
        self.agreed = 0
        self._offset = offset
        self.is_on_host = shards[0].is_cpu
        # Other classes may gather what they like.
        self.is_refused = not all(
            type(shard) is torch.Tensor
            and shard.is_contiguous()
            and shard.device == shards[0].device
            and shard.element_size() in WORDS
            for shard in shards
        )
        self._pointers = list(map(_POINTER, shards))
        self._sampled: list[Any] = []
        if not self.is_refused:
            sample = words_of if self.is_on_host else _words_on_device
            self._sampled = [sample(shard, _SAMPLES) for shard in shards]

    @property
    def is_to_look_at(self) -> bool:
        """Whether inputs are compared as a whole in this step."""
        return self.agreed < TRUSTED_AFTER or (self.agreed + self._offset) % _LOOKS_EVERY == 0

    def note(self, is_whole: bool = False) -> Note:
        """Samples of them, [n] there where they are; b"" if their memory is another now.

        is_whole   on a device: with a sum of all words of each
        """
        if list(map(_POINTER, self.held)) != self._pointers:
            return b""
        if self.is_on_host:
            return b"".join(map(_BYTES, self._sampled))
        sums = [_words_on_device(shard).sum().reshape(1) for shard in self.held] if is_whole else []
        return torch.cat([*self._sampled, *sums])

    def joined(self, dtype: torch.dtype) -> torch.Tensor:
        """[n] An input as FSDP2 makes it, where they are; n = elements of all shards."""
        sizes = [shard.numel() for shard in self.held]
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.empty(sum(sizes), dtype=dtype, device=self.held[0].device)
            torch._foreach_copy_(torch.split_with_sizes(joined, sizes), self.held)
        return joined

    def are_in(self, given: torch.Tensor) -> bool:
        """Whether an input on the CPU is made of these."""
        size = sum(shard.numel() for shard in self.held)
        return given.shape == (size,) and torch.equal(self.joined(given.dtype), given)

    def compared(self, given: torch.Tensor) -> torch.Tensor:
        """[] On a device: whether an input is made of these, for whoever reads it later."""
        if given.shape != (sum(shard.numel() for shard in self.held),):
            return torch.zeros((), dtype=torch.bool, device=given.device)
        return (_words_on_device(self.joined(given.dtype)) == _words_on_device(given.detach())).all()


def _words_on_device(flat: torch.Tensor, most: int = 0) -> torch.Tensor:
    """[n] Words of a flat tensor, of one size each, in its memory; some `most` of them, or all for 0."""
    words = flat.view(WORDS[flat.element_size()])
    return words[:: max(1, len(words) // most)] if most else words


@dataclass
class GatheredInput(Input):
    """An input that FSDP2 has made of shards. Its result is freed; gloo writes that when it has all of the input.

    dtype     of the input
    noted     samples of the shards when it was issued
    is_whole  these have sums of all words
    is_made   on a device: whether it was made of these shards, if that was looked at
    """

    shards: Shards
    dtype: torch.dtype
    noted: Note
    is_whole: bool = False
    is_made: torch.Tensor | None = None

    def put_back(self, own: Sequence[torch.Tensor]) -> None:
        """On a device the input lies in the result, where an operation that was cut off may have written."""
        if not self.shards.is_on_host:
            own[0].copy_(self.made_again()[0])

    def made_again(self) -> Sequence[torch.Tensor]:
        """The input once more. Raises NotRepairableError if the script has changed the shards."""
        now = self.shards.note(self.is_whole)
        if not _are_same(now, self.noted) or (self.is_made is not None and not self.is_made):
            raise NotRepairableError(
                Reason("input-lost", "a parameter was changed after it was gathered: what it was is therefore lost")
            )
        return [self.shards.joined(self.dtype)]


def _are_same(here: Note, there: Note) -> bool:
    """Whether two notes are equal; waits for the device."""
    if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
        return torch.equal(here, there)
    return here is there or (isinstance(here, bytes) and isinstance(there, bytes) and here == there)


class Gathers:
    """What FSDP2 gathers over one process group."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Shards] = weakref.WeakKeyDictionary()  # by the first parameter
        # Since the newest boundary, also of those that are copied; whether with sums of all words.
        self._noted: list[tuple[Entry, Shards, Note, bool]] = []

    def hold(self, entry: Entry, given: torch.Tensor, parameters: Sequence[Any]) -> None:
        """Note an all-gather's input before it is issued, if it need not be copied. Waits for no device.

        given        [n]  the input, any dtype and device
        parameters   of FSDP2's class for these, of whose shards it is to be made; or FSDP1's handle of a flat one
        """
        try:
            own = list(map(_OF_FSDP1 if hasattr(parameters[0], "flat_param") else _SHARD, parameters))
            shards = self._known.get(parameters[0])
            if shards is None or len(own) != len(shards.held) or not all(map(is_, own, shards.held)):
                shards = self._known[parameters[0]] = Shards(own, len(self._known))
        except (AttributeError, IndexError, TypeError):  # another version of torch
            return
        if shards.is_refused or given.is_cpu != shards.is_on_host:
            return
        is_whole = not shards.is_on_host and shards.is_to_look_at
        noted = shards.note(is_whole)
        shards.is_refused = isinstance(noted, bytes) and not noted
        self._noted.append((entry, shards, noted, is_whole))
        if not (shards.is_refused or (shards.is_on_host and shards.is_to_look_at)):
            is_made = shards.compared(given) if is_whole else None
            entry.input = GatheredInput(shards, given.dtype, noted, is_whole, is_made)

    def end_step(self) -> None:
        """The step is committed, nothing of it will be issued again."""
        now: dict[tuple[Shards, bool], Note] = {}
        on_device: list[tuple[Shards, torch.Tensor, torch.Tensor]] = []
        for entry, shards, noted, is_whole in self._noted:
            given = entry.input
            if (shards, is_whole) not in now:
                now[shards, is_whole] = shards.note(is_whole)
            current = now[shards, is_whole]
            if isinstance(noted, torch.Tensor) and isinstance(current, torch.Tensor):
                accelerator.use_here(noted)
                on_device.append((shards, noted, current))
                if isinstance(given, GatheredInput) and given.is_made is not None:
                    accelerator.use_here(given.is_made)
                    made = given.is_made.reshape(1)
                    on_device.append((shards, made, torch.ones_like(made)))
                continue
            is_same = current == noted and all(map(shards.are_in, given.tensors))
            shards.is_refused = shards.is_refused or not is_same
        for shards in {shards for shards, _ in now}:
            shards.agreed += 1
        self._noted.clear()
        if on_device:
            _compare_later(on_device)


def _compare_later(pairs: list[tuple[Shards, torch.Tensor, torch.Tensor]]) -> None:
    """Refuse shards whose notes differ, once the host reads from the device."""
    there, here = torch.cat([noted for _, noted, _ in pairs]), torch.cat([now for _, _, now in pairs])
    sizes = [len(noted) for _, noted, _ in pairs]
    refuse_later([shards for shards, _, _ in pairs], there == here, sizes)
