"""Where one of Python's own iterators stands: what its `__reduce__` tells, and its `__setstate__` takes.

Those of itertools warn in Python 3.12 and 3.13 that they will be gone in 3.14. The script has not asked for it, and
may have made errors of all warnings.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

_WARNS = (3, 12) <= sys.version_info < (3, 14)


def reduce(items: Any) -> Any:
    """What `__reduce__` tells. Raises TypeError if it tells nothing."""
    with _unwarned(items):
        return items.__reduce__()


def set_state(items: Any, state: Any) -> None:
    """Have an iterator stand as the state of another one's `reduce` tells."""
    with _unwarned(items):
        items.__setstate__(state)


def _unwarned(items: Any) -> contextlib.AbstractContextManager[Any]:
    if _WARNS and type(items).__module__ == "itertools":
        return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    return contextlib.nullcontext()
