"""The device's part in a recovery: nothing of the old generation may run on it when the state is sent and compared.

The aborted links end the collectives that wait for a peer (`Link.abort`). A device whose queue an error has stopped, or
that has failed in another way, costs its process, unless the main thread has met the error too: it then ends the
script's run, and it is run again (rerun.py). Begin with `settle`.
"""

from __future__ import annotations

import os
import threading

from ttprun.device import accelerator
from ttprun.device.device_errors import DeviceErrors, DeviceFault, in_one_line
from ttprun.device.interface import DeviceFailedError
from ttprun.groups.host import Member
from ttprun.protocol import from_rank

EXIT_CODE = 1
SETTLE_LIMIT_S = 20.0  # the agent waits for a minute


def enter(session: Member) -> None:
    """This thread works on the device of the script's parameters, as the script's own thread does."""
    device = session.training.device_in_use()
    if device is not None:
        accelerator.use(device.index)


def settle() -> None:
    """The links of all groups are aborted: wait until nothing of the old generation runs on the device any more.

    Raises DeviceFailedError, also after a link error that has stopped the device's queue: nobody knows what of the
    script's work is lost with it. A device that was stopped has no work. Blocks for SETTLE_LIMIT_S at most.
    """
    index = accelerator.current_index()
    if index is None:
        return
    ended = threading.Event()
    failed: list[Exception] = []

    def synchronize() -> None:  # on a thread of its own, since nothing ends it
        try:
            accelerator.use(index)
            accelerator.synchronize()
        except Exception as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=synchronize, name="ttprun-settling", daemon=True).start()
    if not ended.wait(SETTLE_LIMIT_S):
        raise DeviceFailedError(f"the device has not ended its work within {SETTLE_LIMIT_S:.0f} s")
    if failed and DeviceErrors({}).diagnose(failed[0]).fault is not DeviceFault.FORCED_STOP:
        raise DeviceFailedError(f"the device does not end its work ({in_one_line(failed[0])})") from failed[0]


def has_failed(session: Member, error: BaseException) -> bool:
    """Whether an error of a recovery's own work is the device's, as of its memory that is read to be sent."""
    cause = session.diagnose(error)
    return cause.is_of_computation and cause.fault is not DeviceFault.FORCED_STOP


def give_up_process(session: Member, error: DeviceFailedError) -> None:
    """End this process, which cannot use its device any more and is to be replaced. Does not return."""
    cause = session.diagnose(error)
    is_of_link = cause.is_known and not cause.is_of_computation
    fault = str(cause.fault if is_of_link else DeviceFault.DEVICE_LOST)
    session.channel.send(from_rank.ScriptError(in_one_line(error), "", detail=str(error), device_fault=fault))
    os._exit(EXIT_CODE)
