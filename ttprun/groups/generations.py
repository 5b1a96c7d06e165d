"""From one generation to the next: how a member of process groups gets over a lost peer, on a thread of its own.

The order, in each member that still lives:

    freeze             from now on no operation is issued but by this thread
    break_connections  nothing of the old generation touches a tensor any more
    known              what this member has issued since the boundary; all exchange that (agreement.py)
    issue_again        connect in the new generation, issue the journal again, and let the script's threads continue
    complete           wait until all of it has completed

In between all members must come to one boundary, and a new process be where the lost one was: that is the caller's, as
ranks do it in rank/replay, and tests/alone/groups.py without a launcher.

Nothing of the old generation may run on the device when the state is sent and compared. The aborted links end the
collectives that wait for a peer (`Link.abort`); on Ascend, a stop of the device does. A device whose queue an error has
stopped, or that has failed in another way, costs its process, unless the main thread has met the error too: it then
ends the script's run, and it is run again (rerun.py). See `settle`.
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
from ttprun.groups.collectives import issue_again as issue_entry_again
from ttprun.groups.connection import Link
from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.links import cut_all
from ttprun.groups.operations import SAME_FOR_ALL
from ttprun.groups.process_group import ManagedGroup, living
from ttprun.introspect import stages
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import WAITS
from ttprun.protocol import from_rank
from ttprun.protocol.from_rank import CARRIED, GroupJournal

EXIT_CODE = 1
SETTLE_LIMIT_S = 20.0  # the agent waits for a minute


def enter(session: Rank) -> contextlib.AbstractContextManager[Any]:
    """This thread works on the device of the script's parameters, as the script's own thread does.

    returns   inside, a survivor's work goes to a stream of ours: the script's may wait for what is to be issued again.
              Not on Ascend, where nothing may be left on the script's when the device is stopped; and a replacement
              writes to what its script has made on its own stream, in that order.
    """
    device = session.observers.device_in_use()
    if device is not None:
        accelerator.use(device.index)
    is_beside = session.mode.is_live and not _needs_stop(session)
    return accelerator.beside() if is_beside else contextlib.nullcontext()


def _needs_stop(session: Rank) -> bool:
    return any(group.links.needs_stop for group in all_groups(session))


def settle(session: Rank | None = None) -> None:
    """The links of all groups are aborted: wait until nothing of the old generation runs on the device any more.

    session   whose newest step alone is waited for, if a collective came after it: what the script has given the device
              since may wait for this recovery, and only reads its weights. None: all that the device was given

    Raises DeviceFailedError, also after a link error that has stopped the device's queue: nobody knows what of the
    script's work is lost with it. A device that was stopped has no work. Blocks for SETTLE_LIMIT_S at most.
    """
    index = accelerator.current_index()
    if index is None:
        return
    first = None if session is None else _first_since_step(session)
    ended = threading.Event()
    failed: list[Exception] = []

    def synchronize() -> None:  # on a thread of its own, since nothing ends it
        try:
            accelerator.use(index)
            if first is None:
                accelerator.synchronize()
            else:
                with accelerator.beside(first):
                    accelerator.finish_here()
        except Exception as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=synchronize, name="ttprun-settling", daemon=True).start()
    if not ended.wait(SETTLE_LIMIT_S):
        raise DeviceFailedError(f"the device has not ended its work within {SETTLE_LIMIT_S:.0f} s")
    if failed and DeviceErrors({}).diagnose(failed[0]).fault is not DeviceFault.FORCED_STOP:
        raise DeviceFailedError(f"the device does not end its work ({in_one_line(failed[0])})") from failed[0]


def _first_since_step(session: Rank) -> Any:
    """The event before the first collective since the newest step, by which that has ended; None if it is not known."""
    if session.has_collective_steps or session.framework is not None or _needs_stop(session):
        return None
    with session[Journal].lock:
        return next((entry.ready for entry in session[Journal].entries if not entry.is_apart), None)


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


_LOOK_AGAIN_S = 0.05
LET_FINISH_S = 0.05  # time for operations between living ranks to end by themselves
LOCK_LIMIT_S = 1.0  # in which an operation is issued
STUCK_AFTER_S = 2.0  # after a cut; an operation that can end does so within milliseconds


def freeze(member: Rank) -> None:
    """From now on no operation is issued but by the recovery.

    Raises DeviceFailedError if the main thread is stuck while it issues one: it holds the journal's lock then, and may
    wait for the device in C++, where the launch of a kernel waits for a stuck collective. An abort ends that.
    """
    journal = member[Journal]
    if not journal.lock.acquire(timeout=LOCK_LIMIT_S):
        cut_all(group.links for group in list(living))
        if not journal.lock.acquire(timeout=SETTLE_LIMIT_S):
            raise DeviceFailedError("the main thread is stuck in a call of the device, which the abort has not ended")
    journal.is_frozen = True
    journal.changed.notify_all()
    journal.lock.release()


def break_connections(member: Rank, check_overtaken: Callable[[], None] = lambda: None) -> None:
    """Cut every connection, and wait until no operation of the old generation touches a tensor any more.

    check_overtaken   called while this waits for the script; its exception ends the wait

    Operations between living ranks first get LET_FINISH_S: one that is cut with messages in flight may never end.
    """
    groups, journal = all_groups(member), member[Journal]
    works = [(entry, entry.inner) for entry in journal.entries if entry.inner is not None]
    works += journal.take_issued_again()
    end_s = time.monotonic() + LET_FINISH_S
    for _, inner in works:
        has_ended(inner, end_s - time.monotonic())
    end_stuck_tasks(member, [link for group in groups for link in group.links.all], check_overtaken)
    cut_all(group.links for group in groups)
    member.observers.cut()
    settle(member)
    end_s = time.monotonic() + STUCK_AFTER_S
    for entry, inner in works:
        if not has_ended(inner, end_s - time.monotonic()):
            entry.group.links.abandon()
            continue
        with contextlib.suppress(Exception):
            inner.wait()
            entry.group.complete(entry, inner)
    for entry in journal.unfinished():
        journal.attach(entry, None)
    for group in groups:
        group.links.forget()


def all_groups(member: Rank) -> list[ManagedGroup]:
    """All groups that exist, or did at the newest boundary, or that the journal needs, in the order of their making."""
    with member[Journal].lock:
        groups = {entry.group for entry in member[Journal].entries}
    groups |= {*member.made.living.values(), *member.made.left}
    return sorted((group for group in groups if isinstance(group, ManagedGroup)), key=lambda group: group.number)


def known(member: Rank) -> dict[str, GroupJournal]:
    """By group and sequence: ranks, operations since the boundary, and what of them need not be issued again."""
    journals: dict[str, GroupJournal] = {}
    with member[Journal].lock:
        for entry in member[Journal].entries:
            name = CARRIED + entry.sequence if entry.is_carried else entry.sequence
            group = journals.setdefault(name, GroupJournal(list(entry.members), []))
            if entry.is_settled:
                group.settled.append(entry.number)
            if len(group.received) == len(group.issued) and (digest := entry.digest()):
                group.received.append(digest)
            if entry.is_done and (entry.result is not None or entry.input.is_kept):
                group.results.append(len(group.issued))
            elif entry.is_done and entry.op in SAME_FOR_ALL:
                group.taken.append(len(group.issued))
            group.issued.append(entry.signature)
    return journals


def issue_again(member: Rank, connected: Callable[[], None]) -> None:
    """Connect in the member's generation, issue its frozen journal again, and thaw it.

    connected   called when all groups are connected, before the thaw

    The journal has noted what all members agree on. Raises GenerationOverError, or RuntimeError if a connection breaks.
    """
    journal = member[Journal]
    journal.take_issued_again()
    again = journal.issued_again
    is_connected = False
    # A replacement connects these before it issues anything, and a backend may connect within an operation.
    for group in all_groups(member):
        if group.links.is_joined and group.number <= member.made.at_boundary:
            group.links.connect_in(member.generation)
    while True:
        with journal.lock:
            entries, at = journal.entries, len(again)
            entry = entries[at] if at < len(entries) else None
            if entry is None and is_connected:
                journal.is_frozen = False
                journal.changed.notify_all()
                break
        if entry is None:
            _connect_up_to(member, None)
            connected()
            is_connected = True
            continue
        if not entry.group.links.are_of(member.generation):
            _connect_up_to(member, entry.group)
        inner = issue_entry_again(member, entry)
        again.append((entry, inner))
        stages.reached("reissue")
        if not entry.is_done:
            journal.attach(entry, inner)
            if entry.future is not None:
                entry.group.bridge(entry, inner)


def _connect_up_to(member: Rank, newest: ManagedGroup | None) -> None:
    """Connect the groups made before this one, and this one; None: all.

    Not before the journal needs them: a replacement that runs from the top makes a group only after it has issued the
    operations before that. A group that was never connected is left to the main thread.
    """
    for group in all_groups(member):
        if group.links.is_joined and (newest is None or group.number <= newest.number):
            group.links.connect_in(member.generation)


def complete(member: Rank, check_overtaken: Callable[[], None]) -> None:
    """Wait until all that was issued again has completed. Raises the backend's error, or that of `check_overtaken`."""
    for entry, inner in member[Journal].issued_again:
        if entry.is_carried:  # a thread that no replay starts once more would be waited for without end
            continue
        while not has_ended(inner, _LOOK_AGAIN_S):
            check_overtaken()
        inner.wait()
        entry.group.complete(entry, inner)
    check_overtaken()
    member[Journal].take_issued_again()
