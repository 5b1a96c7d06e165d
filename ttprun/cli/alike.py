"""What is written in place of our dots, dashes and arrows where a stream's encoding lacks them. Begin with `ALIKE`."""

from __future__ import annotations

import codecs

ALIKE = "ttprun.alike"  # an error handler of encodings
_LOOK_ALIKE = {"·": "-", "–": "-", "—": "-", "×": "x", "→": "->", "←": "<-", "…": "...", "≤": "<=", "≥": ">=", "µ": "u"}
_LOOK_ALIKE |= zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Write what looks alike where an encoding lacks a character, else its number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = (
        _LOOK_ALIKE.get(character) or character.encode("ascii", "backslashreplace").decode() for character in lacking
    )
    return "".join(shown), error.end


codecs.register_error(ALIKE, _replace)
