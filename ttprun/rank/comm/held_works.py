"""The works that C++ may still wait for, in releases of torch in which it does not keep them alive itself.

DDP's reducer and the functional collectives hold a work of ours in C++ alone. Before torch 2.9 its Python part goes
when Python's last reference does, and C++ then waits in its base class, which nobody ever ends. So the newest works are
held here. A work that has completed gives up its tensors if nobody in Python has it: C++ only waits for it, and has
asked for its future at once.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ttprun import torch_versions

if TYPE_CHECKING:
    from ttprun.rank.comm.work import ManagedWork

IS_NEEDED = torch_versions.loses_works(torch.__version__)
_MOST_HELD = 4096
_under_way: deque[ManagedWork] = deque(maxlen=_MOST_HELD)
_completed: deque[ManagedWork] = deque(maxlen=_MOST_HELD)


def hold(work: Any) -> Any:
    """Keep a new work alive; returns it."""
    while _under_way and _under_way[0].is_completed():
        over = _under_way.popleft()
        if sys.getrefcount(over) == 2:  # `over` itself, and the argument
            over.let_go()
            _completed.append(over)
    _under_way.append(work)
    return work
