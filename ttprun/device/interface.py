"""The seam: what the rest of ttprun asks of a device, whichever it is. Read `Device` first.

Every question is about the one device that this process uses. The phases of a repair in their order are: stop, check
the memory, clean, restart, rebuild the communicators, mark as safe what has been repaired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from ttprun.device.errors import DeviceFault, Diagnosis, diagnosis_of


class DeviceMissingError(RuntimeError):
    """The device, or the library for it, cannot be used here. The message is one line: the cause; the cure."""


class DeviceFailedError(RuntimeError):
    """The device did not do what it was told to; only another process can help."""


class MemoryCheck(IntEnum):
    """Where the memory lies that failed; the numbers are torch_npu's."""

    NONE = 0  # none is known to have failed
    OUTSIDE_POOL = 1  # it belongs to no tensor: not repairable
    TEMPORARY = 2  # nothing holds it any more once the cache is emptied
    PERSISTENT = 3  # living tensors hold it


_FAULTS = {
    MemoryCheck.OUTSIDE_POOL: DeviceFault.MEMORY_OUTSIDE_POOL,
    MemoryCheck.TEMPORARY: DeviceFault.MEMORY_TEMPORARY,
    MemoryCheck.PERSISTENT: DeviceFault.MEMORY_PERSISTENT,
}


def refined(diagnosis: Diagnosis, check: MemoryCheck) -> Diagnosis:
    """What an error means once it is known which memory has failed; NONE says nothing more than the error did."""
    is_news = check is not MemoryCheck.NONE and _FAULTS[check] is not diagnosis.fault
    return diagnosis_of(_FAULTS[check]) if is_news else diagnosis


@dataclass(frozen=True)
class Identity:
    """Which device this is.

    kind       "cpu", "cuda", "npu", or "sim": there is no device, and what is said of it shows ttprun's own work only
    name       the model as its driver tells it
    index      number of the device in this process
    versions   what it takes to drive it -> version, "" if that is not known
    """

    kind: str
    name: str
    index: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Health:
    """Whether the device can be used.

    findings   sentences for an operator; a device that works may have some too
    """

    is_usable: bool
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryFigures:
    """Memory of the device, in bytes.

    free   that any process may still take
    """

    free_bytes: int
    total_bytes: int


class Communicator(Protocol):
    """What a device does in one process group of ttprun's: it stays when the links below are made anew.

    calls   operation -> how often it was issued
    """

    calls: Counter[str]

    def issue(self, links: Any, op: str, args: tuple[Any, ...], inputs: Iterable[Any]) -> Any:
        """Issue an operation; returns the backend's work.

        links   the group's links at present: a process group with the operations as its methods
        inputs  tensors that are read

        Raises RuntimeError, what the device meets.
        """


class Device(Protocol):
    """One kind of device. Methods may block for as long as the device needs to answer, seconds at most."""

    def identify(self) -> Identity:
        """Which device this is. Raises DeviceMissingError."""

    def health(self) -> Health:
        """Whether it can be used; never raises. May wait for what runs on it."""

    def stop(self) -> None:
        """End whatever runs on it; operations of other threads fail from now on. Raises DeviceFailedError."""

    def check_memory(self) -> MemoryCheck:
        """Where the memory lies that failed. Raises DeviceFailedError if the device cannot tell."""

    def clean(self) -> None:
        """Give back what nothing holds any more."""

    def restart(self) -> None:
        """Make it ready for work after `stop`, but for its communicators. Raises DeviceFailedError."""

    def rebuild_communicators(self, group: Any = None, rebuilds_links: bool = False) -> None:
        """Make the device's communicators ready for work after `restart`, in place. Raises DeviceFailedError.

        group            what `communicator` has given, or torch's process group; None: all
        rebuilds_links   connections are made anew, since another process sits at an end of them
        """

    def mark_safe(self, tensor: Any) -> None:
        """A tensor has been written anew, and may be used again, though its memory had failed."""

    def communicator(self) -> Communicator | None:
        """The device's part of a process group of ttprun's that is being made; None: it has none in it."""

    def rng_state(self) -> bytes:
        """State of the device's random generator, b"" if it has none of its own."""

    def restore_rng_state(self, state: bytes) -> None:
        """Put a state of `rng_state` back."""

    def memory(self) -> MemoryFigures:
        """How much memory there is."""
