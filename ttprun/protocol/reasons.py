"""Why a rank is not replaced, or not proved to be as it was: one table, known by its kinds. Begin with `reason_of`.

A message is a sentence that whoever finds the reason writes; its row is found again by words of it, so that nothing
but the sentence crosses between processes. `ttprun explain KIND` prints a row. Standard library only: every part asks.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ttprun.protocol.reason import Reason
from ttprun.protocol.reasons_of_protection import OF_PROTECTION
from ttprun.protocol.reasons_of_recovery import OF_RECOVERY

_MARK = "; what helps: "
# What a message itself says to do.
_SAID = re.compile(
    r"cannot be recorded: |: use |: give each|: zero |: seed |: make |: call |: leave |: raise |: start |: install |"
    r": write|, or broadcast|user_paths|try this line|: step in |: add parameters"
)
# A message is of the first row that is found in it: what is special comes before what may hold it.
REASONS = (*OF_PROTECTION, *OF_RECOVERY)
KINDS = {row.kind: row for row in REASONS}
_FOUND = [(re.compile(row.found), row) for row in REASONS]


@lru_cache(maxsize=1024)
def reason_of(text: str) -> Reason | None:
    """The row of a message; None if it has none."""
    return next((row for pattern, row in _FOUND if pattern.search(text)), None) if text else None


def kind_of(text: str) -> str:
    """The kind of a message; "" if no row is of it."""
    row = reason_of(text)
    return "" if row is None else row.kind


def pointer(text: str) -> str:
    """What a line that ends with this reason goes on with: where it is explained; "" if nowhere."""
    return f" (ttprun explain {kind})" if (kind := kind_of(text)) else ""


def cure_of(text: str) -> str:
    """What helps against it; "" if nothing is known to, or the message itself says so."""
    row = reason_of(text)
    return "" if row is None or says_cure(text) else row.cure


def says_cure(text: str) -> bool:
    """Whether a message itself says what helps."""
    return _SAID.search(text) is not None


def with_cure(text: str) -> str:
    """A message with what helps, for one line."""
    cure = cure_of(text)
    return f"{text}{_MARK}{cure}" if cure and _MARK not in text else text


def split_cure(text: str) -> tuple[str, str]:
    """(the message, what helps) of what `with_cure` has returned."""
    why, _, cure = text.partition(_MARK)
    return why, cure


def not_recorded(name: str, why: str) -> str:
    """One line: the path of a value that cannot be recorded, what it is, and what to do.

    why   continues "it"
    """
    said = f"{name} cannot be recorded: it {why}"
    row = reason_of(f"cannot be recorded: it {why}")
    return said if row is None or row.kind == "iterator-read-by-next" else f"{said}; {row.cure}"
