"""What happens in one place, as a table: a name, a function, and why it stands where it stands.

The order is the table's: tests/rank/test_stages.py and tests/groups/test_stages_of_a_collective.py exchange stages, and
show what would go wrong. Begin with `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

_C = TypeVar("_C")


class Stage(NamedTuple, Generic[_C]):
    """One of the things that happen.

    act       called with what all stages of the table know; where a table can end early: whether it ends here
    why_here  what must have happened before, or not yet
    """

    name: str
    act: Callable[[_C], Any]
    why_here: str
