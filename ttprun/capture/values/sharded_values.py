"""Sharded tensors (DTensor) in variables: a parameter itself, the norm of its gradients, an average of weights.

The layout in a node is [shape of the whole, how it is sharded]. Tensors that optimizers update are recorded like any
other weight. Meshes are not recorded, so the replay must have made a tensor that is sharded alike: its local part is
written.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun.capture.records.nodes import ShardedNode
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.tensors import weight_node
from ttprun.capture.values.type_names import MISSING
from ttprun.capture.values.unrecorded import without_history
from ttprun.introspect.distributed_tensors import is_distributed, local_of


def record_sharded(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Any DTensor: what optimizers update by its place, else by what this rank holds of it."""
    local = local_of(value)
    index = snapshot.stepped.get(local.untyped_storage().data_ptr())
    if index is not None and local.untyped_storage().data_ptr():
        return weight_node(value, index, local.storage_offset())
    if value.grad_fn is not None:
        snapshot.computed.append(value)
    number = snapshot.number(value)
    return ShardedNode(number, snapshot.node(local, depth + 1), _layout(value), value.grad_fn is not None)


def restore_sharded(restore: Restore, live: Any, node: ShardedNode, name: str) -> Any:
    """Write what this rank holds into the replacement's tensor.

    live   a DTensor of the recorded shape and placements, on a mesh of the recorded shape, else it is refused
    """
    layout = node.layout
    if not isinstance(live, torch.Tensor) or not is_distributed(live) or _layout(live) != layout:
        return restore.refuse(
            live,
            unlike(name, "torch:DTensor", live, f"sharded over the ranks ({layout[1]})"),
        )
    # What the replay has computed such a one from is not what the lost rank had; on the way to the boundary it will do.
    is_lost = node.is_computed and (restore.is_comparing or live.grad_fn is None)
    tensor: Any = without_history(live.detach(), name) if is_lost else live
    if not restore.claim_or_refuse(node.number, tensor, name):
        return live
    local = restore.value(tensor._local_tensor, node.local, name)
    if local is MISSING or not isinstance(local, torch.Tensor) or local.shape != tensor._local_tensor.shape:
        return restore.refuse(live, f"{name}: what the lost rank held of it has another shape")
    tensor._local_tensor = local
    return tensor


def _layout(value: Any) -> list[Any]:
    return [list(value.shape), f"{value.placements} over {list(value.device_mesh.shape)} ranks"]
