"""Collectives that another thread issues on a group of its own, as `dcp.async_save` does: they belong to that thread.

They are no part of the main thread's step, and are not compared with it: when they come depends on the disk. In their
group they keep their order, so those that were issued since the boundary are issued again after a fault, and so are
older ones that had not completed. Those of a save that is given up are not.

A replay starts the threads of the step that it repeats once more. What the lost rank's have issued, and with which
result, is in its log, by the boundary at which each thread was started: `Replayed` gives it again, also after the
replay. An operation that others still wait for, or that the lost rank had not come to, is issued with them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from ttprun.groups.journal import Journal
from ttprun.groups.operations import Entry
from ttprun.groups.results import Results
from ttprun.introspect import safe_reads
from ttprun.introspect.current_rank import Rank, current
from ttprun.protocol import from_rank

# Checkpoints that torch's `dcp.async_save` writes on a thread, and the futures that the script has of them.
#
# A replacement has a future that is done in the place of each: the file is no state, and the script only waits for
# it. A save that began before the boundary at which all go on would wait for ever for the lost rank's thread: it is
# given up in all ranks, the rest of the script sees it as done, and a line names it. One that began since is begun
# again by the replacement, and what the other ranks' threads have communicated for it is issued again. Begin with
# `give_up_older`.


class GivenUpError(RuntimeError):
    """What a save's thread was doing when a rank was lost, or wants to do next."""

    is_meant_for_script = True


class Save:
    """One that is under way.

    began_at      the newest boundary then
    shown         the future that the script has
    """

    def __init__(self, session: Rank, where: str, executor: Any) -> None:
        self._session = session
        self._where = where
        self._executor = executor
        self.began_at = session.applied
        self.shown: Future[Any] = Future()
        self.shown.set_running_or_notify_cancel()
        self.is_given_up = False

    def is_of(self, thread: threading.Thread) -> bool:
        """Whether a thread carries it out."""
        return thread in getattr(self._executor, "_threads", ())

    def raise_if_given_up(self) -> None:
        """Raises GivenUpError if it is."""
        if self.is_given_up:
            raise GivenUpError("this save is given up: the connections of the ranks broke meanwhile")

    def end(self, done: Future[Any]) -> None:
        """Its thread has ended it, or an error has."""
        _open.remove(self)
        error = done.exception()
        if error is None:
            self.shown.set_result(done.result())
        elif self.is_given_up:
            self._session.channel.send(from_rank.Note(safe_reads.given_up(self._where)))
            self.shown.set_result(None)
        else:
            self.shown.set_exception(error)


_open: list[Save] = []


def wrap_execute_save(original: Any) -> Any:
    """The executors' execute_save: give the script a future of ours; in a replay, save nothing."""

    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        session, writer = current(), kwargs.get("storage_writer")
        where = str(kwargs.get("checkpoint_id") or getattr(writer, "path", "") or "")
        if session is None or session.world_size == 1:
            return original(self, *args, **kwargs)
        if not session.mode.is_live:
            return safe_reads.done_future(where)
        save = Save(session, where, getattr(self, "_executor", None))
        safe_reads.know_future(save.shown, where)
        _open.append(save)
        try:
            original(self, *args, **kwargs).add_done_callback(save.end)
        except BaseException:
            _open.remove(save)
            raise
        return save.shown

    return execute_save


def of_this_thread() -> Save | None:
    """The save that the calling thread carries out; None if it carries out none."""
    thread = threading.current_thread()
    return next((save for save in list(_open) if save.is_of(thread)), None)


def forget() -> None:
    """The run of the script is over."""
    _open.clear()


class ThreadsOfGroup:
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
                entry.save = of_this_thread()
                if entry.save is not None:
                    entry.save.raise_if_given_up()
        return entry.is_apart


class Replayed:
    """The threads that a replay has started, of a process whose replay is over.

    boundary   they were started before it
    answer     whether an operation of such a thread is answered: as `Mode.answer`
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


def is_answered(session: Rank, entry: Entry) -> bool:
    """Whether another thread's own operation is answered, and not issued. May wait for the end of a replay."""
    if session.mode.is_alone:
        return session.mode.answer(entry)
    return entry.begun < Replayed.boundary and Replayed.answer(entry)


def give_up_older(session: Rank) -> None:
    """All ranks are about to go on from the newest boundary: give up the saves that began before it.

    What has completed of the threads' own, before that boundary, is not issued again.
    """
    for save in list(_open):
        save.is_given_up = save.is_given_up or save.began_at < session.applied
    session[Journal].forget_saves_before(session.applied)
