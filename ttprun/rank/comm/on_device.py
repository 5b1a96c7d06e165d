"""The device's part in a recovery, if it takes part in the process groups: it is stopped and restarted.

The stop ends all operations on the device, so that none touches a tensor any more. The restart follows at once, because
tensors are then compared, sent and saved; the communicators resume later, with the groups. If the device fails to do
so, or has lost memory, the process is replaced. Computations of the main thread fail at the stop with "FORCE STOP",
which ends the script's run, and it is run again (rerun.py). Begin with `stop`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from ttprun.device import accelerator, registry
from ttprun.device.errors import DeviceErrors, DeviceFault, in_one_line
from ttprun.device.interface import DeviceFailedError, MemoryCheck
from ttprun.device.sim import SimulatedNpu
from ttprun.protocol import from_rank
from ttprun.rank.comm.process_group import ManagedGroup
from ttprun.rank.session import Session
from ttprun.rank.weights import optimizer_registry

EXIT_CODE = 1


def stop(groups: Sequence[ManagedGroup]) -> None:
    """Stop the device, if it takes part in one of the groups. Raises DeviceFailedError."""
    if any(group.links.are_on_device for group in groups):
        registry.current().stop()


def enter() -> None:
    """This thread works on the device of the script's parameters, as the script's own thread does."""
    found = accelerator.in_use()
    if found is not None:
        on_device = (one.device for one in optimizer_registry.parameters() if one.device.type == found[0])
        device = next(on_device, None)
        if device is not None:
            found[1].set_device(device)


def settle() -> None:
    """The links of all groups are aborted: wait until nothing of the old generation runs on the device any more.

    Raises DeviceFailedError, also after a link error that has stopped the device's queue: nobody knows what of the
    script's work is lost with it. A device that was stopped has no work.
    """
    try:
        accelerator.synchronize()
    except RuntimeError as error:
        if DeviceErrors({}).diagnose(error).fault is DeviceFault.FORCED_STOP:
            return
        raise DeviceFailedError(f"the device does not end its work ({in_one_line(error)})") from error


def restart(groups: Sequence[ManagedGroup]) -> None:
    """Restart the device after `stop`, without its communicators.

    Raises DeviceFailedError, also if memory has failed: its content is lost.
    """
    if not any(group.links.are_on_device for group in groups):
        return
    device = registry.current()
    found = device.check_memory()
    if found is not MemoryCheck.NONE:
        raise DeviceFailedError(f"memory of the device has failed ({found.name.lower().replace('_', ' ')})")
    device.restart()


def resume_communicators(groups: Sequence[ManagedGroup]) -> None:
    """Resume the communicators of groups with the same processes as before. Raises DeviceFailedError.

    The others are rebuilt one by one with their connections: `Links.connect_in`.
    """
    if any(group.links.are_on_device and not group.links.has_new_peers for group in groups):
        registry.current().rebuild_communicators()


def report_groups(session: Session, groups: Sequence[ManagedGroup], did: str) -> None:
    """Report how the groups' communicators were restored, if the device has any.

    did   "resumed", "rebuilt" in place with new links, or "made" by a new process
    """
    if any(group.links.are_on_device for group in groups):
        device = registry.current()
        calls: Counter[str] = sum((group.links.calls_on_device for group in groups), Counter())
        counters = device.counters() if isinstance(device, SimulatedNpu) else {}
        kind = device.identify().kind
        session.channel.send(from_rank.DeviceReady(session.generation, kind, did, dict(calls), counters))


def give_up_process(session: Session, error: DeviceFailedError) -> None:
    """End this process, which cannot use its device any more and is to be replaced. Does not return."""
    cause = session.diagnose(error)
    fault = str(cause.fault if cause.rung == "reconnect" else DeviceFault.DEVICE_LOST)
    session.channel.send(from_rank.ScriptError(in_one_line(error), "", detail=str(error), device_fault=fault))
    os._exit(EXIT_CODE)
