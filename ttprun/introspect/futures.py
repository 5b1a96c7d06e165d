"""Futures that the script was given in place of what a thread does: a replacement has one that is done.

Begin with `know`.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

# By id: a future of the script's would notice that it is hashed. -> (the future, weakly, for what it stands)
_known: dict[int, tuple[weakref.ref[Future[Any]], str]] = {}


def know(future: Future[Any], what: str) -> None:
    """The script gets this future.

    what   it stands for; of a save the place to which it is written
    """
    key = id(future)
    _known[key] = weakref.ref(future, lambda _: _known.pop(key, None)), what


def what_of(future: Any) -> str | None:
    """What one of these futures stands for; None for any other."""
    reference, what = _known.get(id(future), (None, None))
    return what if reference is not None and reference() is future else None


def done(what: str) -> Future[Any]:
    """One whose work is done, without a result."""
    future: Future[Any] = Future()
    future.set_result(None)
    know(future, what)
    return future


def given_up(where: str) -> str:
    """A save whose thread could not end."""
    return f"the checkpoint that dcp.async_save was writing ({where}) is given up: the ranks had to connect again"


def forget() -> None:
    """The run of the script is over."""
    _known.clear()
