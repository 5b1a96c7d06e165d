"""Ascend: end the collectives that wait for a lost rank. HCCL's abort ends none of them, and waits for them itself.

Only `stop_device` ends a running task, and it ends all of them: the script's own as well, whose results would be
garbage, and whoever uses the device meanwhile gets an error. So the script must stand still first, and all that it has
computed must be there; what waits for a peer is then all that is left on the device. Begin with `end_stuck_tasks`.

Tried on a simulated device only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ttprun.device import accelerator, interface
from ttprun.device.interface import DeviceFailedError
from ttprun.groups.host import Member
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import ManagedGroup
from ttprun.groups.transports import Link

LIMIT_S = 30.0  # for the script to stand still; the agent waits for a minute
_LOOK_S = 0.05  # between two looks at the threads: one that has not run meanwhile waits for something
# Where a thread of the script waits for this recovery, and does not go on before it lets it.
_GATES: frozenset[CodeType] = frozenset({Journal._wait_for_recovery.__code__, ManagedGroup.enter.__code__})
_Look = dict[int, tuple[str, str]]  # native id of a thread -> its state, and how often it has been switched


def end_stuck_tasks(session: Member, links: Iterable[Link], check_overtaken: Callable[[], None]) -> None:
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
    journal, gates, end_s = session[Journal], _GATES | session.training.gates, time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        check_overtaken()
        before = _threads()
        time.sleep(_LOOK_S)
        if not _stand_still(before, gates) or not _has_computed(journal, end_s):
            continue
        with journal.lock:  # nobody leaves a collective, or issues one
            if _stand_still(before, gates):
                _stop_and_restart()
                if not _stand_still(before, gates):
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


def _threads() -> _Look:
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


def _stand_still(before: _Look, gates: frozenset[CodeType]) -> bool:
    """Whether each of these threads waits at a gate, or has not run since that look."""
    at_gates = set(_at_gates(gates))
    now = _threads()
    return now.keys() == before.keys() and all(
        number in at_gates or (state != "R" and (state, switches) == before[number])
        for number, (state, switches) in now.items()
    )


def _at_gates(gates: frozenset[CodeType]) -> Iterable[int]:
    """Native ids of the threads that wait at one."""
    native = {thread.ident: thread.native_id for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if _is_at_gate(frame, gates) and (number := native.get(ident)) is not None:
            yield number


def _is_at_gate(frame: FrameType | None, gates: frozenset[CodeType]) -> bool:
    caller: Any = frame
    while caller is not None:
        if caller.f_code in gates:
            return True
        caller = caller.f_back
    return False
