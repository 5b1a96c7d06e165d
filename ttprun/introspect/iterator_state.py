"""The state of one of Python's own iterators, by its `__reduce__` and `__setstate__`.

Those of itertools warn in Python 3.12 and 3.13 that they will be removed in 3.14; the warnings are suppressed, since
the script may turn warnings into errors.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

_WARNS = (3, 12) <= sys.version_info < (3, 14)


def reduce(items: Any) -> Any:
    """The result of `__reduce__`. Raises TypeError if it has none."""
    with _unwarned(items):
        return items.__reduce__()


def set_state(items: Any, state: Any) -> None:
    """Set an iterator to a state from `reduce`."""
    with _unwarned(items):
        items.__setstate__(state)


def _unwarned(items: Any) -> contextlib.AbstractContextManager[Any]:
    if _WARNS and type(items).__module__ == "itertools":
        return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    return contextlib.nullcontext()
