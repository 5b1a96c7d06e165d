"""The device's part in a recovery: nothing of the old generation may run on it when the state is sent and compared.

The aborted links end the collectives that wait for a peer (`Link.abort`); on Ascend, a stop of the device does. A
device whose queue an error has stopped, or that has failed in another way, costs its process, unless the main thread
has met the error too: it then ends the script's run, and it is run again (rerun.py). Begin with `settle`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ttprun.device import accelerator, interface
from ttprun.device.device_errors import DeviceErrors, DeviceFault, in_one_line
from ttprun.device.interface import DeviceFailedError
from ttprun.groups.connection import Link
from ttprun.groups.journal import Journal
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.frames import WAITS
from ttprun.protocol import from_rank

EXIT_CODE = 1
SETTLE_LIMIT_S = 20.0  # the agent waits for a minute


def enter(session: Rank) -> None:
    """This thread works on the device of the script's parameters, as the script's own thread does."""
    device = session.observers.device_in_use()
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


def has_failed(session: Rank, error: BaseException) -> bool:
    """Whether an error of a recovery's own work is the device's, as of its memory that is read to be sent."""
    cause = session.diagnose(error)
    return cause.is_of_computation and cause.fault is not DeviceFault.FORCED_STOP


def give_up_process(session: Rank, error: DeviceFailedError) -> None:
    """End this process, which cannot use its device any more and is to be replaced. Does not return."""
    cause = session.diagnose(error)
    is_of_link = cause.is_known and not cause.is_of_computation
    fault = str(cause.fault if is_of_link else DeviceFault.DEVICE_LOST)
    session.channel.send(from_rank.ScriptError(in_one_line(error), "", detail=str(error), device_fault=fault))
    os._exit(EXIT_CODE)


# Ascend: end the collectives that wait for a lost rank. HCCL's abort ends none of them, and waits for them itself.
#
# Only `stop_device` ends a running task, and it ends all of them: the script's own as well, whose results would be
# garbage, and whoever uses the device meanwhile gets an error. So the script must stand still first, and all that it
# has computed must be there; what waits for a peer is then all that is left on the device. Begin with
# `end_stuck_tasks`.
#
# Tried on a simulated device only.

LIMIT_S = 30.0  # for the script to stand still; the agent waits for a minute
_LOOK_S = 0.05  # between two looks at the threads: one that has not run meanwhile waits for something
_Look = dict[int, tuple[str, str]]  # native id of a thread -> its state, and how often it has been switched


def end_stuck_tasks(session: Rank, links: Iterable[Link], check_overtaken: Callable[[], None]) -> None:
    """End what runs on the device for these links, if their backend cannot: nothing runs there any more then.

    links             of all groups; each counts as aborted from now on
    check_overtaken   called while this waits; its exception ends the wait

    Raises DeviceFailedError if the script does not stand still within LIMIT_S, or the device does not answer well.
    """
    late = [link for link in links if link.is_late and link.needs_stop]
    if not any(link.is_busy() for link in late):
        return
    for link in late:
        link.is_aborted = True  # who waits for its operations waits for this recovery from now on
    journal, end_s = session[Journal], time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        check_overtaken()
        before = _script_threads()
        time.sleep(_LOOK_S)
        if not _stand_still(before) or not _has_computed(journal, end_s):
            continue
        with journal.lock:  # nobody leaves a collective, or issues one
            if _stand_still(before):
                _stop_and_restart()
                if not _stand_still(before):
                    raise DeviceFailedError("the script has worked on while its device was stopped: work is lost")
                return
    raise DeviceFailedError(
        f"the script has not come to a collective within {LIMIT_S:.0f} s: its device cannot be stopped under it"
    )


def _stop_and_restart() -> None:
    device = interface.current()
    device.stop()
    device.restart()


def _has_computed(journal: Journal, end_s: float) -> bool:
    """Whether the device has computed all that the script's collectives were given, and what is on this thread's
    stream: the script's own, unless it has made another."""
    events = [entry.ready for entry in journal.unfinished() if entry.ready is not None]
    events.append(accelerator.mark())
    for event in events:
        while event is not None and not event.query():
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S / 10)
    return True


def _script_threads() -> _Look:
    """The threads that give the device work: the script's, and autograd's."""
    me, main = threading.get_native_id(), threading.main_thread().native_id
    look: _Look = {}
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            number, status = int(folder.name), (folder / "status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if number != me and (number == main or fields["Name"].startswith("pt_autograd")):
                switches = [fields[f"{kind}_ctxt_switches"].strip() for kind in ("voluntary", "nonvoluntary")]
                look[number] = fields["State"][0], ",".join(switches)
    return look


def _stand_still(before: _Look) -> bool:
    """Whether each of these threads waits at a gate, or has not run since that look."""
    at_gates = set(_at_gates())
    now = _script_threads()
    return now.keys() == before.keys() and all(
        number in at_gates or (state != "R" and (state, switches) == before[number])
        for number, (state, switches) in now.items()
    )


def _at_gates() -> Iterable[int]:
    """Native ids of the threads that wait at one."""
    native = {thread.ident: thread.native_id for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if _is_at_gate(frame) and (number := native.get(ident)) is not None:
            yield number


def _is_at_gate(frame: FrameType | None) -> bool:
    caller: Any = frame
    while caller is not None:
        if caller.f_code in WAITS:
            return True
        caller = caller.f_back
    return False
