"""A reduce-scatter over gloo, which has none of its own: an all-reduce, of which each rank keeps its part.

torch (2.13) does the same, but a recovery cannot use the work that it returns: that never reports completion, ignores
time limits, waits in C++ for as long as the operation lasts, and writes its output again each time it is waited for.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttprun.rank.comm.journal import has_succeeded

OPERATIONS = frozenset(
    {"_reduce_scatter_base", "reduce_scatter_single"}
    | {"reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"}
)


def is_for(op: str, args: tuple[Any, ...]) -> bool:
    """Whether it is such an operation, on the CPU."""
    return op in OPERATIONS and all(one.is_cpu for one in _as_list(args[1]))


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class ReduceScatter:
    """One operation, with the interface of the backend's works.

    native   process group whose backend is gloo
    rank     of this process in it
    size     of the group
    args     output, input, and torch's options; of a coalesced one, lists of outputs and inputs
    """

    def __init__(self, native: Any, rank: int, size: int, args: tuple[Any, ...]) -> None:
        outputs, given, *others = args
        options = dist.AllreduceOptions()
        if others:
            options.reduceOp, options.timeout = others[0].reduceOp, others[0].timeout
        reduced = [one.detach().clone(memory_format=torch.contiguous_format) for one in _as_list(given)]
        self._outputs = _as_list(outputs)
        self._parts = [one.chunk(size)[rank] for one in reduced]
        self._is_kept = False
        self._lock = threading.Lock()
        self._inner = [native.allreduce([one], options) for one in reduced]

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
            for one in finished.value():
                one.value()
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
                self._is_kept = True
