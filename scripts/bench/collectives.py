"""Our own CPU time for each collective, over a connection that does nothing: what a script pays beside its backend.

PYTHONPATH=. python scripts/bench/collectives.py
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.rank.fakes import make_session
from ttprun.groups.connection import Exchange
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import ManagedGroup
from ttprun.groups.results import Results
from ttprun.introspect import current_rank

A_STEP = 50  # collectives
STEPS = 60


class Work:
    """Done at once."""

    def wait(self, *limit: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Link:
    """A connection that does nothing."""

    generation = 0
    backend = None

    def issue(self, op: str, args: Any) -> Work:
        return Work()


def least_us(size_bytes: int) -> float:
    """The least time of an all-reduce of so many bytes, with its wait, among some steps."""
    session = make_session()
    current_rank.begin(session)
    group = ManagedGroup(session, session[Exchange], "world", [0, 1], 0, timedelta(seconds=5))
    link: Any = Link()
    group.links._by_type = {"cpu": link}
    tensors = [torch.ones(size_bytes // 4) for _ in range(A_STEP)]
    options = dist.AllreduceOptions()
    least_s = float("inf")
    for step in range(STEPS):
        session[Results].begin_step(step)
        began_s = time.thread_time()
        for tensor in tensors:
            group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]
        least_s = min(least_s, (time.thread_time() - began_s) / A_STEP)
        session[Journal].clear()
        session.applied += 1
    return 1e6 * least_s


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size_bytes in (4 << 10, 256 << 10):
        print(f"all_reduce of {size_bytes >> 10} KiB: {least_us(size_bytes):.1f} us")
