"""Where one of Python's own iterators stands: what its `__reduce__` tells, and its `__setstate__` takes.

Those of itertools warn in Python 3.12 and 3.13 that they will be gone in 3.14. The script has not asked for it, and
may have made errors of all warnings.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_WARNS = (3, 12) <= sys.version_info < (3, 14)


def reduce(items: Any) -> Any:
    """What `__reduce__` tells. Raises TypeError if it tells nothing."""
    if not (_WARNS and type(items).__module__ == "itertools"):
        return items.__reduce__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return items.__reduce__()


def set_state(items: Any, state: Any) -> None:
    """Have an iterator stand as the state of another one's `reduce` tells."""
    if not (_WARNS and type(items).__module__ == "itertools"):
        items.__setstate__(state)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        items.__setstate__(state)
