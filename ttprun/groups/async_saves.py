"""Checkpoints that torch's `dcp.async_save` writes on a thread, and the futures that the script has of them.

A replacement has a future that is done in the place of each: the file is no state, and the script only waits for it. A
save that began before the boundary at which all go on would wait for ever for the lost rank's thread: it is given up in
all ranks, the rest of the script sees it as done, and a line names it. One that began since is begun again by the
replacement, and what the other ranks' threads have communicated for it is issued again. Begin with `give_up_older`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ttprun.groups.host import Member, current
from ttprun.introspect import futures
from ttprun.protocol import from_rank


class GivenUpError(RuntimeError):
    """What a save's thread was doing when a rank was lost, or wants to do next."""

    is_meant_for_script = True


class Save:
    """One that is under way.

    began_at      the newest boundary then
    shown         the future that the script has
    """

    def __init__(self, session: Member, where: str, executor: Any) -> None:
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

    def end(self, done: Future[Any]) -> None:
        """Its thread has ended it, or an error has."""
        _open.remove(self)
        error = done.exception()
        if error is None:
            self.shown.set_result(done.result())
        elif self.is_given_up:
            self._session.channel.send(from_rank.Note(futures.given_up(self._where)))
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
            return futures.done(where)
        save = Save(session, where, getattr(self, "_executor", None))
        futures.know(save.shown, where)
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


def raise_if_given_up(save: Save | None) -> None:
    """Raises GivenUpError if it is."""
    if save is not None and save.is_given_up:
        raise GivenUpError("this save is given up: the connections of the ranks broke meanwhile")


def give_up_older(boundary: int) -> None:
    """All ranks go on from this boundary: give up the saves that began before it and are not done."""
    for save in list(_open):
        save.is_given_up = save.is_given_up or save.began_at < boundary


def forget() -> None:
    """The run of the script is over."""
    _open.clear()
