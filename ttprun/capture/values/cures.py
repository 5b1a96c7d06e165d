"""What to do about a value that cannot be recorded."""

from __future__ import annotations

import re

# What it is -> what to do. The first that is found.
_CURES = (
    ("read by next|is a cycle that gathers|followed", ""),  # it is said there
    ("position", "run over it by a `for` loop of your own, or count its items and take them by index"),
    ("another thread or process|shared with", "have it done before the optimizer steps, and keep the result"),
    ("container of|tuple of", "keep it in an array or a tensor"),
    ("set of objects", "keep them in a list or a dictionary"),
)
_CURE_OTHERWISE = "set it in each step before it is read, or keep what the steps read of it in numbers, lists or arrays"


def not_recorded(name: str, why: str) -> str:
    """One line: the path of a value that cannot be recorded, what it is, and what to do.

    why   continues "it"
    """
    cure = next((cure for pattern, cure in _CURES if re.search(pattern, why)), _CURE_OTHERWISE)
    return f"{name} cannot be recorded: it {why}{'; ' if cure else ''}{cure}"
