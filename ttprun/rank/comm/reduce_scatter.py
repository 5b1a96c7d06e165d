"""A reduce-scatter over gloo, which has none of its own: an all-reduce, of which each rank keeps its part.

torch (2.13) does the same, but a recovery cannot use the work that it returns: that never reports completion, ignores
time limits, and waits in C++ for as long as the operation lasts.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttprun.rank.comm.journal import has_succeeded

OPERATIONS = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})


class ReduceScatter:
    """One operation, with the interface of the backend's works.

    native   process group whose backend is gloo
    rank     of this process in it
    size     of the group
    args     output, input, and torch's options
    """

    def __init__(self, native: Any, rank: int, size: int, args: tuple[Any, ...]) -> None:
        self._output, given, *others = args
        options = dist.AllreduceOptions()
        if others:
            options.reduceOp, options.timeout = others[0].reduceOp, others[0].timeout
        reduced = given.detach().clone(memory_format=torch.contiguous_format)
        self._part = reduced.chunk(size)[rank]
        self._is_kept = False
        self._lock = threading.Lock()
        self._inner = native.allreduce([reduced], options)

    def wait(self, *limit: timedelta) -> bool:
        """Block until the output is written, `limit` at most. Raises what the backend raises."""
        self._inner.wait(*limit)
        self._keep_part()
        return True

    def is_completed(self) -> bool:
        """Whether the output is written, or the operation has failed."""
        if not self._inner.is_completed():
            return False
        if self.is_success():
            self._keep_part()
        return True

    def is_success(self) -> bool:
        return has_succeeded(self._inner)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output."""

        def completed(finished: torch.futures.Future[Any]) -> list[torch.Tensor]:
            finished.value()
            self._keep_part()
            return [self._output]

        future: torch.futures.Future[Any] = self._inner.get_future().then(completed)
        return future

    def _keep_part(self) -> None:
        with self._lock, torch.no_grad():
            if not self._is_kept:
                self._output.copy_(self._part.reshape(self._output.shape))
                self._part = self._part.new_empty(0)
                self._is_kept = True
