"""Collectives that another thread issues on a group of its own, as `dcp.async_save` does: they belong to that thread.

They are no part of the main thread's step, and are not compared with it: when they come depends on the disk. In their
group they keep their order, so those that were issued since the boundary are issued again after a fault, and so are
older ones that had not completed. Those of a save that is given up are not (async_saves.py).

A replay starts the threads of the step that it repeats once more. What the lost rank's have issued, and with which
result, is in its log, by the boundary at which each thread was started: `Replayed` gives it again, also after the
replay. An operation that others still wait for, or that the lost rank had not come to, is issued with them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ttprun.groups import async_saves
from ttprun.groups.entry import Entry
from ttprun.groups.host import Member, current
from ttprun.groups.journal import Journal
from ttprun.groups.results import Results


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
                entry.begun = _begun.get(threading.current_thread(), 0)
                entry.save = async_saves.of_this_thread()
                async_saves.raise_if_given_up(entry.save)
        return entry.is_apart


class Replayed:
    """The threads that a replay has started, of a process whose replay is over.

    boundary   they were started before it
    answer     whether an operation of such a thread is answered: as `Life.answer`
    """

    boundary = 0
    answer: ClassVar[Callable[[Entry], bool]]


_begun: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()


def wrap_start(original: Any) -> Any:
    """threading.Thread.start: note the newest boundary."""

    def start(self: threading.Thread) -> None:
        if (session := current()) is not None:
            _begun[self] = session.applied if session.mode.is_live else session.mode.step
            if (results := session.parts.get(Results)) is not None:  # a rank has none before its first group
                results.has_begun_threads = True
        original(self)

    return start


def is_answered(session: Member, entry: Entry) -> bool:
    """Whether another thread's own operation is answered, and not issued. May wait for the end of a replay."""
    if session.mode.is_alone:
        return session.mode.answer(entry)
    return entry.begun < Replayed.boundary and Replayed.answer(entry)


def give_up_older(session: Member) -> None:
    """All ranks are about to go on from the newest boundary: give up the saves that began before it.

    What has completed of the threads' own, before that boundary, is not issued again.
    """
    async_saves.give_up_older(session.applied)
    session[Journal].forget_saves_before(session.applied)
