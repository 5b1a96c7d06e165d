"""Collectives where a framework recovers by callbacks of its own: what a recovery breaks off is never issued again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttprun.rank import moments
from ttprun.rank.comm.work import ManagedWork, Refused

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from ttprun.rank.comm.journal import Entry, Journal
    from ttprun.rank.framework.framework import Framework


def issue_once(framework: Framework, journal: Journal, entry: Entry, is_left_out: bool = False) -> Work:
    """Issue an operation whose inputs are not kept: a recovery ends the wait for it. Raises what `admit` raises.

    is_left_out   a fault has this rank leave it out
    """
    framework.admit()
    if is_left_out or framework.is_joining:
        entry.is_done = True
        return ManagedWork(journal, entry)
    entry.group.connect_if_new()
    journal.forget_completed()
    with journal.lock:
        framework.admit()
        try:
            entry.inner = entry.group.call(entry.op, entry.args)
        except RuntimeError as error:
            if not framework.is_of_connection(error):
                raise
            entry.inner = Refused(error)  # whoever waits for it waits for a recovery
        journal.entries.append(entry)
    moments.reached("collective")
    return ManagedWork(journal, entry)
