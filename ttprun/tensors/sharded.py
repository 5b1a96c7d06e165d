"""Tensors that are sharded over the ranks: DTensors, as FSDP2 and tensor parallelism make them.

Their meshes and placements declare which part a rank holds. Begin with `place_of` and `chunk_of`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ttprun import torch_versions
from ttprun.introspect.model_tensors import is_distributed, local_of, parts_of, shown_to
from ttprun.protocol.reason import Reason
from ttprun.state.chunks import Chunk


def place_of(tensor: torch.Tensor) -> str | None:
    """Which part of the whole this rank holds; None if it is the whole.

    Ranks with the same place hold the same, if theirs are parts of the same tensor.
    """
    if not is_distributed(tensor):
        return None
    whole: Any = tensor
    cut = [at for at, placement in enumerate(whole.placements) if not placement.is_replicate()]
    if not cut:
        return None
    mesh, here = whole.device_mesh, whole.device_mesh.get_coordinate()
    parts = ", ".join(f"{here[at]} of {mesh.size(at)} by {whole.placements[at]}" for at in cut)
    return f"{list(whole.shape)}: {parts}"


def are_cut_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether this rank holds the same part of two tensors of one shape, such as a parameter and its gradient."""
    if is_distributed(tensor) and is_distributed(other):
        first: Any = tensor
        second: Any = other
        if first._spec is second._spec:  # FSDP2 gives a gradient that of its parameter
            return True
    return place_of(tensor) == place_of(other)


def layout_of(tensor: torch.Tensor) -> str:
    """How the whole is cut, which must be the same in all ranks whose parts make one whole.

    tensor   a DTensor that is not the same in all ranks
    """
    whole: Any = tensor
    cut = [at for at, placement in enumerate(whole.placements) if not placement.is_replicate()]
    return f"{list(whole.shape)}: {', '.join(f'{whole.device_mesh.size(at)} by {whole.placements[at]}' for at in cut)}"


def chunk_of(tensor: torch.Tensor) -> Chunk | None:
    """The part of the whole that this rank holds; None if all ranks hold all of it. See `why_not_stored` first."""
    if place_of(tensor) is None:
        return None
    whole: Any = tensor
    return _box(whole, tuple(whole.device_mesh.shape), whole.device_mesh.get_coordinate())


def held_by_all(tensor: torch.Tensor) -> list[list[Any]]:
    """Each rank's part of a sharded tensor, by its mesh: [rank, shape, offsets, sizes]."""
    whole: Any = tensor
    mesh = whole.device_mesh.mesh
    boxes = []
    for coordinate in itertools.product(*map(range, mesh.shape)):
        box = _box(whole, tuple(mesh.shape), list(coordinate))
        assert box is not None
        boxes.append([int(mesh[coordinate]), list(whole.shape), list(box.offsets), list(box.sizes)])
    return boxes


def _box(whole: Any, mesh_shape: tuple[int, ...], coordinate: list[int]) -> Chunk | None:
    """The part of a place in the mesh; None if it is not one box of the whole.

    Each placement, from left to right, cuts what those before it have left. A _StridedShard takes the pieces that a
    later Shard of the same dimension makes one box of, as in FSDP2 over tensor parallelism.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    indices_of: dict[int, torch.Tensor] = {}  # dimension -> indices that this place holds
    for size, here, placement in zip(mesh_shape, coordinate, whole.placements, strict=True):
        if placement.is_replicate():
            continue
        indices = indices_of.setdefault(placement.dim, torch.arange(whole.shape[placement.dim]))
        is_strided = isinstance(placement, _StridedShard)
        cut: Any = _StridedShard(0, split_factor=placement.split_factor) if is_strided else Shard(0)
        pieces, _ = cut._split_tensor(indices, size, with_padding=False, contiguous=True)
        indices_of[placement.dim] = pieces[here]
    offsets, sizes = [0] * whole.dim(), list(whole.shape)
    for dimension, indices in indices_of.items():
        sizes[dimension] = len(indices)
        offsets[dimension] = int(indices[0]) if len(indices) else whole.shape[dimension]
        if not torch.equal(indices, torch.arange(offsets[dimension], offsets[dimension] + len(indices))):
            return None
    return Chunk(tuple(whole.shape), tuple(offsets), tuple(sizes))


def why_not_held(tensors: Iterable[torch.Tensor]) -> Reason:
    """Why it is unknown which parts of these tensors this rank holds; "" if it is known."""
    for tensor in filter(is_distributed, tensors):
        whole: Any = tensor
        if any(placement.is_partial() for placement in whole.placements):
            return Reason("sharding-unknown", "its parameters are partial sums over the ranks (Partial)")
        if type(local_of(whole)) not in (torch.Tensor, torch.nn.Parameter):
            return Reason(
                "sharding-unknown", f"the parts of its sharded parameters are of {type(local_of(whole)).__name__}"
            )
    return Reason()


def why_not_stored(tensors: Iterable[torch.Tensor]) -> Reason:
    """Why the ranks' parts of these tensors cannot be stored together; "" if they can."""
    for tensor in filter(is_distributed, tensors):
        whole: Any = tensor
        from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

        odd = next((cut for cut in whole.placements if type(cut) not in (Shard, Replicate, _StridedShard)), None)
        if odd is not None:
            return Reason(
                "sharding-unknown", f"its parameters are sharded over the ranks in a way that is not stored yet ({odd})"
            )
        chunk = chunk_of(whole)
        if chunk is None and place_of(whole) is not None:
            return Reason(
                "sharding-unknown",
                f"the parts of its sharded parameters are not one box each ({layout_of(whole)}), which is not stored",
            )
        if tuple(local_of(whole).shape) != (tuple(whole.shape) if chunk is None else chunk.sizes):
            return Reason("sharding-unknown", "the parts of its sharded parameters do not match their mesh")
    return Reason()


# FSDP2's own copies of what it has gathered.


def _groups() -> Iterator[Any]:
    """All groups of parameters that FSDP2 gathers together."""
    fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    states = sys.modules.get("torch.distributed._composable_state")
    if fully_shard is None or states is None:
        return
    seen = set()
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        if isinstance(state, fully_shard.FSDPState) and id(state) not in seen:
            seen.add(id(state))  # one may be that of several modules
            yield from torch_versions.fsdp_param_groups(state)


def why_not_at_rest(optimizer: torch.optim.Optimizer) -> Reason:
    """Why FSDP2's state cannot be recorded now; "" if all of it is in the shards that the optimizer steps."""
    stepped: set[int] | None = None
    for group in _groups():
        for param in group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            if param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
                return Reason("gradients-carried", "unreduced gradients are kept across an optimizer step")
        if group._all_gather_result is not None:
            return Reason("sharding-unknown", "parameters are being gathered while the optimizer steps")
        if not group.is_sharded:
            if stepped is None:
                stepped = set(map(id, shown_to(optimizer)))
            if any(id(param.sharded_param) in stepped for param in group.fsdp_params):
                return Reason(
                    "sharding-unknown",
                    "gathered parameters are kept across the optimizer step (set_reshard_after_backward(False)?)",
                )
    return Reason()


def forget_gathered() -> None:
    """After the shards have been loaded: drop gathered parameters, which FSDP2 gathers again."""
    for group in _groups():
        if not group.is_sharded:
            group._to_sharded()


def sharded_parameters(module: torch.nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    """(id of the module, name) of each parameter that FSDP2 manages in a module -> the sharded one.

    The module itself may hold the gathered one at the moment.
    """
    parts = {id(part) for _, part in parts_of(module)}
    parameters: dict[tuple[int, str], torch.Tensor] = {}
    for group in _groups():
        for param in group.fsdp_params:
            info = param._module_info
            for owner, name in (
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ):
                if id(owner) in parts:
                    parameters[id(owner), name] = param.sharded_param
    return parameters
