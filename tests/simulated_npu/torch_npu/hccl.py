"""The backend `hccl`, and `torch.distributed.reinit_process_group`; the collectives are in csrc/hccl.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch_npu.npu import _C, current_device


def _make(options: Any, further: Any = None) -> Any:
    """One group. Its connections are made by its first collective, since a rank may leave before that."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout

    def connect(generation: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(f"hccl{generation}", store), rank, size, timeout=timeout)

    return _C.make_hccl(rank, size, timeout, connect)


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """Without `rebuild_link` all groups that a stop has aborted work again; with it, one connects anew.

    group   torch's process group, or the backend of one; None: the default group
    """
    if not rebuild_link:
        _C.resume_hccl(current_device())
        return None
    group = dist.distributed_c10d._get_default_group() if group is None else group
    backend = group._get_backend(torch.device("npu")) if isinstance(group, dist.ProcessGroup) else group
    _C.reinit_hccl(backend)
    return group


dist.Backend.register_backend("hccl", _make, extended_api=True, devices=["npu"])
dist.reinit_process_group = reinit_process_group
