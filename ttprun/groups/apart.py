"""Collectives that another thread issues on a group of its own, as `dcp.async_save` does: they belong to that thread.

They are no part of the main thread's step, and are not compared with it: when they come depends on the disk. In their
group they keep their order, so those that were issued since the boundary are issued again after a fault. Those of a
save that is given up are not (async_saves.py).
"""

from __future__ import annotations

import threading

import torch

from ttprun.groups import async_saves
from ttprun.groups.entry import Entry
from ttprun.groups.host import Member
from ttprun.groups.journal import Journal


class Own:
    """Whose the operations of one group are.

    is_of_main   the main thread uses the group: nothing in it is another thread's own
    """

    def __init__(self) -> None:
        self.is_of_main = False

    def look(self, entry: Entry) -> bool:
        """An operation is about to be issued: note whether it is another thread's own, and return that.

        Those of a group that the main thread uses as well are the step's, and so are those of a backward pass. Raises
        GivenUpError if it is of a save that is given up.
        """
        if not self.is_of_main:
            is_main = threading.current_thread() is threading.main_thread()
            self.is_of_main = is_main or torch._C._current_graph_task_id() != -1
            if not self.is_of_main:
                entry.is_apart = True
                entry.save = async_saves.of_this_thread()
                async_saves.raise_if_given_up(entry.save)
        return entry.is_apart


def give_up_older(session: Member) -> None:
    """All ranks are about to go on from the newest boundary: give up the saves that began before it."""
    async_saves.give_up_older(session.applied)
    session[Journal].forget_saves_before(session.applied)
