"""The end of a rank's process: end the threads of process groups before the interpreter ends.

A gloo thread that completes an operation takes the GIL, for a callback or to release a tensor. If the interpreter is
finalizing, Python ends the thread by unwinding its stack, and C++ answers that with abort() (torch 2.13; torch's own
groups too, unless the script has destroyed them). A script that ended well would then be "ended by signal 6": one time
in some hundreds, or nearly always if it does not wait for its last collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.links import run_together
from ttprun.groups.process_group import living
from ttprun.groups.transports import Link
from ttprun.rank.checks.verification import Verifier
from ttprun.rank.session import Session

LIMIT_S = 1.0  # of each wait


def close(session: Session) -> None:
    """End this rank's native threads and connections, after the script's own exit handlers.

    Mostly takes a millisecond. Operations that the script has not waited for get LIMIT_S to finish, and are then cut;
    what does not end then either is left running.
    """
    if session.recovery is not None:
        session.recovery.retire()
        session.recovery.join(LIMIT_S)
    session[Verifier].end(LIMIT_S)
    works = [entry.inner for entry in session[Journal].unfinished() if entry.inner is not None]
    session[Journal].clear()
    links = [link for group in living for link in group.links.all]
    for group in living:
        group.links.forget()
    closing = threading.Thread(target=_close_all, args=(links,), name="ttprun-ending", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # Python 3.12 starts no thread so late
        _close_here(links, works)
        return
    closing.join(LIMIT_S)
    if closing.is_alive():
        run_together([link.abort for link in links], LIMIT_S)
        closing.join(LIMIT_S)


def _close_all(links: list[Link]) -> None:
    for link in links:
        link.close()


def _close_here(links: list[Link], works: Iterable[Any]) -> None:
    """Close the connections on this thread, which that must not block: those still in use are abandoned."""
    if not _have_ended(works):
        for link in links:
            link.abort()
        if not _have_ended(works):
            for link in links:
                link.abandon()
    _close_all(links)


def _have_ended(works: Iterable[Any]) -> bool:
    """Whether all have ended; waits LIMIT_S at most."""
    end_s = time.monotonic() + LIMIT_S
    return all(has_ended(work, end_s - time.monotonic()) for work in works)
