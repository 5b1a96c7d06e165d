"""The end of a member's process: end the threads of its process groups before the interpreter ends.

A gloo thread that completes an operation takes the GIL, for a callback or to release a tensor. If the interpreter is
finalizing, Python ends the thread by unwinding its stack, and C++ answers that with abort() (torch 2.13; torch's own
groups too, unless the script has destroyed them). A script that ended well would then be "ended by signal 6": one
time in some hundreds, or nearly always if it does not wait for its last collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ttprun.groups.host import Member
from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.links import run_together
from ttprun.groups.process_group import living
from ttprun.groups.transports import Link
from ttprun.groups.transports.late import destroying


def end(member: Member, limit_s: float) -> None:
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
