"""Room for files of our own in a process that has as many open as its soft limit allows (`ulimit -n`)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def with_room() -> Iterator[None]:
    """Inside, the soft limit is the hard one; afterwards it is the script's again, and what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
