"""A reduce-scatter over gloo, which has none of its own: an all-reduce, of which each rank keeps its part.

torch (2.13) does the same, but a recovery cannot use the work that it returns: that never reports completion, ignores
time limits, waits in C++ for as long as the operation lasts, and writes its output again each time it is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttprun.groups.journal import has_succeeded
from ttprun.introspect.tensor_bytes import size_of

OPERATIONS = frozenset(
    {"_reduce_scatter_base", "reduce_scatter_single"}
    | {"reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"}
)

_MOST_SPARE = 2
_MOST_SPARE_BYTES = 64 << 20


def is_for(op: str, args: tuple[Any, ...]) -> bool:
    """Whether it is such an operation, on the CPU."""
    return op in OPERATIONS and all(tensor.is_cpu for tensor in _as_list(args[1]))


class SpareMemory:
    """Memory in which inputs are reduced, used again by later operations.

    As torch clones each input and frees the clone, the system clears its pages each time: 5 % of the processor time of
    a step with FSDP2. At most _MOST_SPARE buffers of _MOST_SPARE_BYTES are kept, more than FSDP2 uses at once.
    """

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """A tensor of bytes, at least `size` of them."""
        with self._lock:
            at = next((at for at, spare in enumerate(self._spare) if spare.nbytes >= size), None)
            if at is not None:
                return self._spare.pop(at)
        with torch.inference_mode(False):  # or nothing could write to it outside of one
            return torch.empty(size, dtype=torch.uint8)

    def take_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Nothing reads or writes these any more.

        buffers   from `take`
        """
        with self._lock:
            kept = [*self._spare, *(buffer for buffer in buffers if buffer.nbytes <= _MOST_SPARE_BYTES)]
            self._spare = sorted(kept, key=size_of)[-_MOST_SPARE:]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copied_to(buffer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of `given` at the beginning of a tensor of bytes."""
    return buffer[: given.nbytes].view(given.dtype).view(given.shape).copy_(given.detach())


class ReduceScatter:
    """One operation, with the interface of the backend's works.

    native   process group whose backend is gloo
    rank     of this process in it
    size     of the group
    args     output, input, and torch's options; of a coalesced one, lists of outputs and inputs
    memory   of operations over the same connection
    """

    def __init__(self, native: Any, rank: int, size: int, args: tuple[Any, ...], memory: SpareMemory) -> None:
        outputs, given, *others = args
        options = dist.AllreduceOptions()
        if others:
            options.reduceOp, options.timeout = others[0].reduceOp, others[0].timeout
        inputs = _as_list(given)
        self._memory = memory
        self._buffers = [memory.take(tensor.nbytes) for tensor in inputs]
        reduced = [_copied_to(buffer, tensor) for buffer, tensor in zip(self._buffers, inputs, strict=True)]
        self._outputs = _as_list(outputs)
        self._parts = [tensor.chunk(size)[rank] for tensor in reduced]
        self._is_kept = False
        self._lock = threading.Lock()
        self._inner = [native.allreduce([tensor], options) for tensor in reduced]

    def wait(self, *limit: timedelta) -> bool:
        """Block until the outputs are written, `limit` for each at most. Raises what the backend raises."""
        for work in self._inner:
            work.wait(*limit)
        self._keep_parts()
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are written, or the operation has failed."""
        if not all(work.is_completed() for work in self._inner):
            return False
        if self.is_success():
            self._keep_parts()
        return True

    def is_success(self) -> bool:
        return all(map(has_succeeded, self._inner))

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs."""

        def completed(finished: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for inner in finished.value():
                inner.value()
            self._keep_parts()
            return self._outputs

        together = torch.futures.collect_all([work.get_future() for work in self._inner])
        future: torch.futures.Future[Any] = together.then(completed)
        return future

    def _keep_parts(self) -> None:
        with self._lock, torch.no_grad():
            if not self._is_kept:
                for output, part in zip(self._outputs, self._parts, strict=True):
                    output.copy_(part.reshape(output.shape))
                self._parts = []
                self._memory.take_back(self._buffers)
                self._is_kept = True
