"""What torch_npu has as `torch.npu`."""

from __future__ import annotations

import torch


def is_available() -> bool:
    """Whether there is a device."""
    return True


def is_initialized() -> bool:
    """Whether this process has used a device."""
    return True


def device_count() -> int:
    """Devices of the node."""
    return 1


def current_device() -> int:
    """The index of this thread's device."""
    return 0


def set_device(device: object) -> None:
    """Make it this thread's."""


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    """Seed the generator of this thread's device."""


def manual_seed_all(seed: int) -> None:
    """Seed those of all devices."""


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of a device's generator."""
    return torch.empty(0, dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    """Put it back."""


def synchronize(device: object = None) -> None:
    """Wait for all streams of a device."""


def get_device_name(device: object = None) -> str:
    """Says that it is simulated."""
    return "simulated Ascend NPU (no hardware)"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may be asked for."""
    return [torch.float16, torch.bfloat16]
