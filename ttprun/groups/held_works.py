"""Keep works alive that C++ may still wait for, before torch 2.9.

DDP's reducer and the functional collectives hold our works in C++ alone. In those versions their Python part dies with
Python's last reference, and C++ then waits for ever in the base class. So the newest works are held here; completed
ones without their tensors, unless Python code holds them too.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ttprun import torch_versions

if TYPE_CHECKING:
    from ttprun.groups.work import ManagedWork

IS_NEEDED = torch_versions.loses_works(torch.__version__)
_MOST_HELD = 4096
_under_way: deque[ManagedWork] = deque(maxlen=_MOST_HELD)
_completed: deque[ManagedWork] = deque(maxlen=_MOST_HELD)


def hold(work: Any) -> Any:
    """Keep a new work alive; returns it."""
    while _under_way and _under_way[0].is_completed():
        over = _under_way.popleft()
        if sys.getrefcount(over) == 2:  # `over` itself, and the argument
            over.release()
            _completed.append(over)
    _under_way.append(work)
    return work
