"""A simulated device that fails on purpose; the tensors that it ruins are the script's own.

As with defective memory, no version counter changes. Tensors of running collectives are spared, since a memory error of
this rank does not reach the others. Begin with `break_device`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ttprun.device import accelerator, registry
from ttprun.device.sim import Queue, SimulatedNpu
from ttprun.rank.comm.operations import tensors_in
from ttprun.rank.session import Session
from ttprun.rank.weights import optimizer_registry
from ttprun.rank.weights.tensor_bytes import bytes_of

_GARBAGE = random.Random(1).randbytes(4093)


def break_device(session: Session, kind: str) -> tuple[str, RuntimeError | None]:
    """Break the simulated device, which is the process's device from now on.

    returns   what was done, and the error for the script's next operation; None: the device itself raises one, or the
              script's next collective

    Raises ValueError if there is nothing to break yet.
    """
    if accelerator.in_use() is not None:
        return _break_memory_of_device(kind), None
    device = registry.current()
    if not isinstance(device, SimulatedNpu):
        device = SimulatedNpu()
    npu = device.module.npu
    ruined: list[torch.Tensor] = []
    if kind in ("uce-high", "uce-fatal", "ecc"):
        ruined = optimizer_registry.stepped_tensors()
        if not ruined:
            raise ValueError("no optimizer holds a parameter yet")
    elif kind == "uce-low":
        ruined = list(_gradients(session))
    for tensor in ruined:
        ruin(tensor)
    if kind in ("uce-high", "ecc"):
        for tensor in ruined:
            npu.fail_memory(tensor, Queue.UCE_EXIT if kind == "uce-high" else Queue.HBM_ECC_EXIT)
    elif kind == "uce-low":
        npu.fail_memory(torch.empty(1))  # an activation, which nothing holds any more
    elif kind == "uce-fatal":
        npu.fail_memory_of_library()
    elif kind == "link":
        return _break_link(session, device)
    else:
        npu.lose()
    registry.simulate(device)
    size = sum(tensor.nbytes for tensor in ruined)
    return f"simulated device; {len(ruined)} tensors ({size} bytes) hold garbage", npu.error()


def _break_memory_of_device(kind: str) -> str:
    """The same on a device with memory of its own, which raises its errors itself, when it meets them."""
    breaking: Any = sys.modules.get("torch_npu.breaking")
    if breaking is None:
        raise ValueError("only a simulated device can be broken on purpose")
    if kind == "link":
        breaking.fail_next_collective()
        return "simulated device; its next collective fails"
    if kind == "device-lost":
        breaking.lose_device()
        return "simulated device; it no longer answers"
    failed = [tensor for tensor in optimizer_registry.stepped_tensors() if tensor.device.type == "npu"]
    if not failed:
        raise ValueError("no optimizer holds a parameter on the device yet")
    if kind == "uce-fatal":
        breaking.fail_memory_of_library()
        return "simulated device; memory that belongs to no tensor fails in the next collective"
    if kind == "uce-low":
        activation = torch.ones_like(failed[0])
        breaking.fail_memory(activation)
        activation.add_(1)  # read, and then given back
        return f"simulated device; memory of an activation ({activation.nbytes} bytes) fails"
    for tensor in failed:
        breaking.fail_memory(tensor, breaking.State.UCE_EXIT if kind == "uce-high" else breaking.State.HBM_ECC_EXIT)
    size = sum(tensor.nbytes for tensor in failed)
    return f"simulated device; {len(failed)} tensors ({size} bytes) hold garbage, and fail when they are read"


def _break_link(session: Session, device: SimulatedNpu) -> tuple[str, None]:
    groups = list(session.groups.values())
    if not groups:
        raise ValueError("the script has no process group")
    registry.simulate(device)
    for group in groups:
        group.links.move_to_device()
    device.module.npu.queue = Queue.HCCS_LINK_EXIT
    return "simulated device; its next collective fails", None


def ruin(tensor: torch.Tensor) -> None:
    """Fill a tensor with garbage."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        with torch.no_grad():
            tensor.detach().fill_(-1 if not tensor.is_floating_point() else float("nan"))
        return
    raw = bytes_of(tensor)
    raw[:] = (_GARBAGE * (len(raw) // len(_GARBAGE) + 1))[: len(raw)]


def _gradients(session: Session) -> Iterator[torch.Tensor]:
    """Gradients of the optimizers' parameters, except those that a collective is using."""
    busy = {
        tensor.untyped_storage().data_ptr()
        for entry in session.journal.unfinished()
        for tensor in tensors_in(entry.args)
    }
    for optimizer in optimizer_registry.optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.untyped_storage().data_ptr() not in busy:
                    yield gradient
