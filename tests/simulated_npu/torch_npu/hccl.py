"""The backend `hccl`: the collectives of npu tensors, carried by gloo between the hosts' copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch import distributed as dist


class _Work(dist._Work):
    def __init__(self, below: Any, outputs: Sequence[Any], finish: Callable[[], None]) -> None:
        super().__init__()
        self._below, self._outputs, self._finish = below, outputs, finish
        self._is_finished = False
        self._future: Any = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_finished:
            self._below.wait()
            self._finish()
            self._is_finished = True
        return True

    def get_future(self) -> Any:
        if not self._future.done():
            self.wait()
            self._future.set_result(list(self._outputs))
        return self._future

    def is_completed(self) -> bool:
        return bool(self._below.is_completed())


class ProcessGroupHCCL(dist.ProcessGroup):
    """One group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "hccl"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        hosts = [tensor.cpu() for tensor in tensors]
        return self._work(self._gloo.allreduce(hosts, opts or dist.AllreduceOptions()), tensors, hosts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        hosts = [tensor.cpu() for tensor in tensors]
        return self._work(self._gloo.broadcast(hosts, opts or dist.BroadcastOptions()), tensors, hosts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        hosts = [[tensor.cpu() for tensor in of_one] for of_one in outputs]
        work = self._gloo.allgather(hosts, [tensor.cpu() for tensor in inputs], opts or dist.AllgatherOptions())
        return self._work(work, list(chain(*outputs)), list(chain(*hosts)))

    def barrier(self, opts: Any = None) -> _Work:
        return self._work(self._gloo.barrier(opts or dist.BarrierOptions()), [], [])

    def _work(self, below: Any, outputs: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> _Work:
        def finish() -> None:
            for output, host in zip(outputs, hosts, strict=True):
                output.copy_(host)

        return _Work(below, outputs, finish)


def _make(options: Any, further: Any) -> ProcessGroupHCCL:
    return ProcessGroupHCCL(options.store, options.group_rank, options.group_size, options.timeout)


dist.Backend.register_backend("hccl", _make, extended_api=True, devices=["npu"])
