"""What happens in one place, as a table: a name, a function, and why it stands where it stands.

The order is the table's: tests/rank/test_stages.py exchanges stages, and shows what would go wrong. Begin with `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

_C = TypeVar("_C")


class Stage(NamedTuple, Generic[_C]):
    """One of the things that happen.

    act       called with what all stages of the table know
    why_here  what must have happened before, or not yet
    """

    name: str
    act: Callable[[_C], None]
    why_here: str
