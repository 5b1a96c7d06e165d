"""A simulated device that fails on purpose (`tests/simulated_npu`), in memory that holds the script's own tensors.

The device raises its errors itself, when it meets what has failed. Begin with `break_device`.
"""

from __future__ import annotations

import sys
from typing import Any

from ttprun.introspect.distributed_tensors import local_of
from ttprun.tensors import optimizer_registry


def break_device(kind: str) -> str:
    """Break this process's device; returns what was done. Raises ValueError if that cannot be done."""
    breaking: Any = sys.modules.get("torch_npu.breaking")
    if breaking is None:
        raise ValueError(
            "only the simulated NPU can be broken on purpose: run with --device npu (ttprun guide devices)"
        )
    if kind == "link":
        breaking.fail_next_collective()
        return "simulated device; its next collective fails"
    if kind == "device-lost":
        breaking.lose_device()
        return "simulated device; it no longer answers"
    held = (local_of(tensor) for tensor in optimizer_registry.stepped_tensors() if tensor.device.type == "npu")
    failed = [tensor for tensor in held if tensor.untyped_storage().nbytes()]
    if not failed:
        raise ValueError("no optimizer holds a parameter on the device yet")
    if kind == "uce-fatal":
        breaking.fail_memory_of_library()
        return "simulated device; memory that belongs to no tensor fails in the next collective"
    if kind == "uce-low":
        activation = failed[0].detach().clone()
        breaking.fail_memory(activation)
        activation.add_(1)  # read, and then given back
        return f"simulated device; memory of an activation ({activation.nbytes} bytes) fails"
    for tensor in failed:
        breaking.fail_memory(tensor, breaking.State.UCE_EXIT if kind == "uce-high" else breaking.State.HBM_ECC_EXIT)
    size = sum(tensor.nbytes for tensor in failed)
    return f"simulated device; {len(failed)} tensors ({size} bytes) hold garbage, and fail when they are read"
