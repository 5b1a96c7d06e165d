"""The device's part in a recovery, where it has a part in the process groups: a stop while all stand still, and back.

A stop ends whatever runs on the device, so that no operation that was cut off touches a tensor any more; the device is
restarted at once, since tensors are read long before the groups go on: to compare them, to send them, to save them. The
communicators follow when the groups do. A device that cannot do that, or has lost memory, costs the process, which is
replaced. What the main thread computes on the device at the moment of the stop fails with "FORCE STOP", which ends the
script's run, to be answered by rerun; the simulated device computes nothing but collectives. Begin with `stop`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from ttprun.device import registry
from ttprun.device.errors import DeviceFault, in_one_line
from ttprun.device.interface import DeviceFailedError, MemoryCheck
from ttprun.device.sim import SimulatedNpu
from ttprun.protocol import from_rank
from ttprun.rank.comm.process_group import ManagedGroup
from ttprun.rank.session import Session

EXIT_CODE = 1


def stop(groups: Sequence[ManagedGroup]) -> None:
    """End whatever runs on the device, if it carries one of the groups. Raises DeviceFailedError."""
    if any(group.is_on_device for group in groups):
        registry.current().stop()


def restart(groups: Sequence[ManagedGroup]) -> None:
    """Have the device take orders again after `stop`, but for collectives.

    Raises DeviceFailedError, also if memory has failed: what was in it is lost, and this rank cannot go on.
    """
    if not any(group.is_on_device for group in groups):
        return
    device = registry.current()
    found = device.check_memory()
    if found is not MemoryCheck.NONE:
        raise DeviceFailedError(f"memory of the device has failed ({found.name.lower().replace('_', ' ')})")
    device.restart()


def resume_communicators(groups: Sequence[ManagedGroup]) -> None:
    """Have those of groups whose members have all kept their processes go on. Raises DeviceFailedError.

    The others are rebuilt one by one, as their links are: `ManagedGroup.connect_in`.
    """
    if any(group.is_on_device and not group.has_new_peers for group in groups):
        registry.current().rebuild_communicators()


def tell_of_groups(session: Session, groups: Sequence[ManagedGroup], did: str) -> None:
    """Note in the event log what has become of the groups' communicators, if the device has any.

    did   "resumed", "rebuilt" in place with new links, or "made" by a new process
    """
    if any(group.is_on_device for group in groups):
        device = registry.current()
        calls: Counter[str] = sum((group.calls_on_device for group in groups), Counter())
        counters = device.counters() if isinstance(device, SimulatedNpu) else {}
        kind = device.identify().kind
        session.channel.send(from_rank.DeviceReady(session.generation, kind, did, dict(calls), counters))


def give_up_process(session: Session, error: DeviceFailedError) -> None:
    """End this process, so that another one takes its place: it can use its device no more. Does not return."""
    fault = str(DeviceFault.DEVICE_LOST)
    session.channel.send(from_rank.ScriptError(in_one_line(error), "", detail=str(error), device_fault=fault))
    os._exit(EXIT_CODE)
