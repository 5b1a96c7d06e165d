"""What breaks the simulated device; the real one has nothing of the kind."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch_npu.npu import _C, current_device


class State(IntEnum):
    """Where a device's queue of tasks stands; up to 11 the numbers are torch_npu's."""

    RUN = 0
    UCE_EXIT = 5
    STOP_EXIT = 6
    HBM_ECC_EXIT = 7
    SUSPECT_MEM_EXIT = 8
    HCCS_LINK_EXIT = 9
    HCCL_OP_RETRY_EXIT = 10
    SUSPECT_REMOTE_EXIT = 11
    TASK_TIMEOUT = 20
    AICORE_EXIT = 21
    LOST = 22


def fail_memory(tensor: torch.Tensor, kind: State = State.UCE_EXIT) -> None:
    """The tensor's memory holds garbage, and fails when it is read."""
    storage = tensor.untyped_storage()
    _C.poison(tensor.device.index, storage.data_ptr(), storage.nbytes(), kind)


def fail_memory_of_library() -> None:
    """Memory has failed that is no tensor's; the next collective reads it."""
    _C.poison_library(current_device())


def fail_next_collective(state: State = State.HCCS_LINK_EXIT) -> None:
    """The next collective of this process meets this error."""
    _C.break_next_collective(state)


def lose_device() -> None:
    """This thread's device does not answer any more."""
    _C.fail(current_device(), State.LOST)


def close_gate() -> None:
    """This thread's stream computes nothing more until a broadcast that is issued after this has succeeded."""
    _C.close_gate()
