"""From one generation to the next: how a member of process groups gets over a lost peer, on a thread of its own.

The order, in each member that still lives:

    freeze             from now on no operation is issued but by this thread
    break_connections  nothing of the old generation touches a tensor any more
    known              what this member has issued since the boundary; all exchange that (agreement.py)
    issue_again        connect in the new generation, issue the journal again, and let the script's threads continue
    complete           wait until all of it has completed

In between all members must come to one boundary, and a new process be where the lost one was: that is the caller's, as
ranks do it in rank/replay, and tests/alone/groups.py without a launcher.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ttprun.device.interface import DeviceFailedError
from ttprun.groups import device_stop
from ttprun.groups.collectives import issue_again as issue_entry_again
from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.links import cut_all
from ttprun.groups.operations import SAME_FOR_ALL
from ttprun.groups.process_group import ManagedGroup, living
from ttprun.introspect import fault_points
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.from_rank import CARRIED, GroupJournal

LOOK_AGAIN_S = 0.05
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
        if not journal.lock.acquire(timeout=device_stop.SETTLE_LIMIT_S):
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
    device_stop.end_stuck_tasks(member, [link for group in groups for link in group.links.all], check_overtaken)
    cut_all(group.links for group in groups)
    member.observers.cut()
    device_stop.settle()
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
            if entry.digest and len(group.received) == len(group.issued):
                group.received.append(entry.digest)
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
        fault_points.reached("reissue")
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
        while not has_ended(inner, LOOK_AGAIN_S):
            check_overtaken()
        inner.wait()
        entry.group.complete(entry, inner)
    check_overtaken()
    member[Journal].take_issued_again()
