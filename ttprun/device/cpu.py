"""The CPU as a device: nothing runs asynchronously, and failed memory ends the process."""

from __future__ import annotations

import os
import platform
from typing import Any

from ttprun.device.interface import Health, Identity, MemoryCheck, MemoryFigures


class CpuDevice:
    """The machine's processor and memory."""

    def identify(self) -> Identity:
        """The processor."""
        return Identity("cpu", platform.machine(), 0, {})

    def health(self) -> Health:
        """It runs this."""
        return Health(is_usable=True)

    def stop(self) -> None:
        """Nothing runs beside the threads of the process."""

    def check_memory(self) -> MemoryCheck:
        """An uncorrectable error of main memory is a SIGBUS, so there was none."""
        return MemoryCheck.NONE

    def clean(self) -> None:
        """Memory is freed by itself."""

    def restart(self) -> None:
        """Nothing was stopped."""

    def rebuild_communicators(self) -> None:
        """gloo's connections are ttprun's own: see `ttprun.groups.connection`."""

    def mark_safe(self, tensor: Any) -> None:
        """No tensor is ever unsafe."""

    def rng_state(self) -> bytes:
        """The processor's generator is recorded by `ttprun.introspect.random_state`."""
        return b""

    def restore_rng_state(self, state: bytes) -> None:
        """As above."""

    def memory(self) -> MemoryFigures:
        """Main memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryFigures(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)
