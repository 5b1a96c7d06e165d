"""What is to be read of tensors on devices, gathered: the CPU waits for each copy, so there is one at a boundary.

Whoever needs such a value before a step leaves the tensor here, and what to do with it. What is small is put together
on the device and copied at once, by `take`; evidence of the step (rank/proof.py) waits here for it, too. Nothing
is left here of tensors on the CPU, whose values are there. Begin with `later`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ttprun.device import accelerator
from ttprun.introspect.tensor_bytes import plain_together

Use = Callable[[list[torch.Tensor]], None]

# Tensors, what is to be done with their copies, and the event of the device after which they are there; None: on the
# stream that will read them.
Waiting = tuple[Sequence[torch.Tensor], Use, Any]
waiting: list[Waiting] = []


def later(tensors: Sequence[torch.Tensor], use: Use, ready: Any = None) -> None:
    """Copy tensors with the next `take`. Does not block.

    tensors   dense, any dtype, shape and device; nobody writes to them before
    use       called once, with contiguous copies on the CPU
    ready     as in `waiting`
    """
    waiting.append((tensors, use, ready))


class Sent:
    """Copies on their way to the CPU, for whoever asks until they are there, in any thread."""

    def __init__(self, taken: list[Waiting]) -> None:
        self._taken = taken
        parts = [tensor.reshape(-1).view(torch.uint8) for tensors, _, _ in taken for tensor in tensors]
        self._sizes = [len(part) for part in parts]
        self._on_device = torch.cat([*parts, torch.ones(1, dtype=torch.uint8, device=parts[0].device)])
        self._copy = torch.empty(self._on_device.shape, dtype=torch.uint8, pin_memory=True)
        self._copy[-1] = 0  # stays if the device fails before the copy: an event may come all the same
        self._copy.copy_(self._on_device, non_blocking=True)
        self._there = accelerator.mark()

    def is_completed(self) -> bool:
        """Whether they are there, or never will be."""
        try:
            return bool(self._there.query())
        except Exception:  # the device has failed
            return True

    def set_result(self, _: None) -> None:
        """Use them."""
        copies = list(torch.split(self._copy[:-1], self._sizes))
        for tensors, use, _ in self._taken if self._copy[-1] == 1 else ():
            with contextlib.suppress(Exception):  # what is not noted is not proved, and named then
                use(copies[: len(tensors)])
            del copies[: len(tensors)]


def send() -> Sent | None:
    """Begin to copy what waits on this thread's device; the rest goes on waiting. Does not block; None if nothing does.

    What another stream computes is waited for on this thread's.
    """
    here = accelerator.current_index()
    taken: list[Waiting] = []
    elsewhere: list[Waiting] = []
    for entry in _take():
        is_here = entry[0] and all(tensor.device.index == here and not tensor.is_cpu for tensor in entry[0])
        (taken if is_here else elsewhere).append(entry)
    waiting[:0] = elsewhere
    return Sent(taken) if taken else None


def _take() -> list[Waiting]:
    taken = waiting.copy()
    del waiting[: len(taken)]  # another thread may have added to it
    for _, _, ready in taken:
        if ready is not None:
            ready.wait()
    return taken


def take(further: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Copy all that waits, and use it in the order in which it came; then return copies of `further`.

    Blocks until the device has computed it. Raises the device's error, and what a use raises.
    """
    taken = _take()
    copies = plain_together([*(tensor for tensors, _, _ in taken for tensor in tensors), *further])
    at = 0
    for tensors, use, _ in taken:
        use(copies[at : at + len(tensors)])
        at += len(tensors)
    return copies[at:]


def forget() -> None:
    """The run of the script is over: drop its tensors."""
    waiting.clear()
