"""Whoever uses our libraries in this process: in a rank its Session; None in any other process.

What a library needs of it stands in that library's own host.py. Begin with `current`.
"""

from __future__ import annotations

import os
from typing import Any

_host: Any = None


def current() -> Any:
    """This process's host; None if it has none, and in the forked children of one that has."""
    return _host


def begin(host: Any) -> None:
    """Make `host` this process's own."""
    global _host
    _host = host


def end() -> None:
    """This process has no host any more."""
    begin(None)


def leave_in_children() -> None:
    """Forked children have no host."""
    os.register_at_fork(after_in_child=end)
