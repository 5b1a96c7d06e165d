"""batch_isend_irecv over a device's backend, which starts the operations of a batch together.

torch asks only groups of its own type whether they can, and starts those of all others one after the other: over NCCL
two ranks that send to each other would then wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ttprun.groups.process_group import ManagedGroup


def wrap_batch_isend_irecv(original: Any) -> Any:
    """torch.distributed.batch_isend_irecv: as torch does for a group of its own."""

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        first = p2p_op_list[0] if type(p2p_op_list) is list and p2p_op_list else None
        group = getattr(first, "group", None) or dist.group.WORLD
        if not isinstance(first, dist.P2POp) or not isinstance(group, ManagedGroup):
            return original(p2p_op_list)
        device = first.tensor.device
        if not group.can_batch(device):
            return original(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for message in p2p_op_list:
                call = group.send if message.op is dist.isend else group.recv
                call([message.tensor], message.group_peer, message.tag)
        return manager.works

    return batch_isend_irecv
