"""How a rank leaves the others: together with them, as each may be needed to repair another, and then for good (`end`).

It stays when it destroys its process group (`leave_together`), and when its script has come to its end (`stay`).
Neither may hold up a job that torchrun would let go on: see `OthersPatience`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ttprun.groups.connection import Link
from ttprun.groups.device_link import destroying
from ttprun.groups.journal import PATIENCE_S, Journal, has_ended
from ttprun.groups.links import run_together
from ttprun.groups.process_group import living
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.board import FINISHED, Field, Phase
from ttprun.protocol.patience import Patience

_LOOK_AGAIN_S = 1.0
_STUCK_S = 5.0  # in a collective, while this rank has come to its end: it may wait for this rank's exit
_SILENT_S = 120.0  # no bytecode, no collective and no step: perhaps it waits for this rank's exit by other means


def leave_together(session: Rank) -> None:
    """Wait until every rank destroys its process group.

    Ends after PATIENCE_S if a rank waits in a collective meanwhile: it may wait for this rank, and must fail as under
    torchrun.
    """
    if not session.made.living:
        return
    session.observers.leaves()
    session.made.times_left += 1
    board, times = session.board, session.made.times_left
    board.announce(session.rank, Field.LEAVING, times)
    session.share_row()
    if not session.is_repairable() or not session.mode.is_live:
        return
    session.touch(Phase.FINISHED)
    patience = OthersPatience(session, PATIENCE_S)
    for row in range(board.n_ranks):
        while (
            (theirs := board.get(row, Field.LEAVING)) < times
            and not _has_ended(session, row)
            and not session.unprotected
        ):
            board.wait_for_change(row, Field.LEAVING, theirs, _LOOK_AGAIN_S)
            if patience.is_over([row]):
                return


def stay(session: Rank) -> None:
    """The script has come to its end, its exit handlers included: wait until that is so in every rank.

    Meanwhile this rank takes part in repairs: its recovery thread serves what it holds. It does not stay if the others
    take steps without it, if one waits for it, or if it is ordered to end.
    """
    board = session.board
    board.announce(session.rank, Field.ENDED, 1)
    session.share_row()
    if not session.made.count or not session.is_repairable() or session.framework is not None:
        return
    session.touch(Phase.FINISHED)
    recorded = board.get(session.rank, Field.RECORDED)
    patience = OthersPatience(session, _STUCK_S)
    while rows := [row for row in range(board.n_ranks) if not _has_ended(session, row)]:
        is_let_go = session.unprotected or session.trains_alone or session[Journal].is_ended
        if is_let_go or patience.is_over(rows) or any(board.get(row, Field.RECORDED) > recorded for row in rows):
            return
        board.wait_for_change(rows[0], Field.ENDED, 0, _LOOK_AGAIN_S)
    _finish_recovery(session)


def _finish_recovery(session: Rank) -> None:
    """The last collective has completed for all; that ends a repair only when our recovery thread has reported it."""
    waits = Patience(_STUCK_S)
    while session.recovery is not None and not session.recovery.is_idle(_LOOK_AGAIN_S) and not waits.look():
        pass


def _has_ended(session: Rank, row: int) -> bool:
    board = session.board
    return board.get(row, Field.ENDED) != 0 or board.get(row, Field.RECORDED) == FINISHED


class OthersPatience:
    """Whether a rank that is waited for may be waiting itself for this rank to leave; asked now and then.

    stuck_s   that long it may wait in one collective, if the machine is not busy
    """

    def __init__(self, session: Rank, stuck_s: float) -> None:
        self._session = session
        self._stuck_s = stuck_s
        self._seen: dict[int, tuple[tuple[int, ...], Patience]] = {}  # row -> what it had done, and the wait since

    def is_over(self, rows: list[int]) -> bool:
        """`rows` are those that are waited for now; a repair takes its time."""
        board = self._session.board
        if self._session.is_holding:
            self._seen.clear()
        for row in rows:
            is_waiting = board.get(row, Field.PHASE) in (Phase.COLLECTIVE, Phase.WAITING)
            done: tuple[int, ...] = (is_waiting, board.get(row, Field.COLLECTIVES), board.get(row, Field.APPLIED))
            if not is_waiting:
                done += (board.get(row, Field.MAIN_BEATS),)  # while it waits, the bytecode is that of our loop
            seen = self._seen.get(row)
            if seen is None or seen[0] != done:
                self._seen[row] = done, Patience(self._stuck_s if is_waiting else _SILENT_S)
            elif seen[1].look():
                return True
        return False


# The end of a member's process: end the threads of its process groups before the interpreter ends.
#
# A gloo thread that completes an operation takes the GIL, for a callback or to release a tensor. If the interpreter
# is finalizing, Python ends the thread by unwinding its stack, and C++ answers that with abort() (torch 2.13; torch's
# own groups too, unless the script has destroyed them). A script that ended well would then be "ended by signal 6":
# one time in some hundreds, or nearly always if it does not wait for its last collectives.


def end(member: Rank, limit_s: float) -> None:
    """End native threads and connections, after the script's own exit handlers.

    Mostly takes a millisecond. Operations that the script has not waited for get `limit_s` to finish, and are then cut;
    what does not end then either is left running.
    """
    works = [entry.inner for entry in member[Journal].unfinished() if entry.inner is not None]
    member[Journal].clear()
    links = [link for group in living for link in group.links.all]
    for group in living:
        group.links.forget()
    end_s = time.monotonic() + limit_s
    for thread in [*destroying]:  # destructors in C++: if one ended later than the interpreter, it would abort
        thread.join(max(0.0, end_s - time.monotonic()))
    closing = threading.Thread(target=_close_all, args=(links,), name="ttprun-ending", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # Python 3.12 starts no thread so late
        _close_here(links, works, limit_s)
        return
    closing.join(limit_s)
    if closing.is_alive():
        run_together([link.abort for link in links], limit_s)
        closing.join(limit_s)


def _close_all(links: list[Link]) -> None:
    for link in links:
        link.close()


def _close_here(links: list[Link], works: Iterable[Any], limit_s: float) -> None:
    """Close the connections on this thread, which that must not block: those still in use are abandoned."""
    if not _have_ended(works, limit_s):
        for link in links:
            link.abort()
        if not _have_ended(works, limit_s):
            for link in links:
                link.abandon()
    _close_all(links)


def _have_ended(works: Iterable[Any], limit_s: float) -> bool:
    """Whether all have ended; waits limit_s at most."""
    end_s = time.monotonic() + limit_s
    return all(has_ended(work, end_s - time.monotonic()) for work in works)
