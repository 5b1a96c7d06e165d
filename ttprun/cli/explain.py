"""`ttprun explain`: what ttprun changes inside the user's process, and how it judges the script's variables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

MEANING = (
    "ttprun does not change your files: it wraps the functions below inside each rank's process, to record what a "
    "replacement of that rank needs and to rebuild its connections."
)
JUDGEMENT = (
    "When a rank is replaced, each variable of the script is judged by the first line that fits; behind the arrow, "
    "what follows from it."
)
_MOST_COLUMNS = 100


def explain() -> int:
    """Show what ttprun changes inside your process, and why; and how it judges your variables.

    Your files are never changed.
    """
    from ttprun.capture.position.judgement import ORDER
    from ttprun.rank.bootstrap.patch_table import ALSO, PATCHES, Change, Patch

    rows: tuple[Patch | Change, ...] = (*PATCHES, *ALSO)
    width = width_of_lines()
    print(textwrap.fill(MEANING, width))
    for patch in rows:
        name = f"{patch.module}: {patch.attribute}"
        name = textwrap.fill(name, width, break_long_words=False, break_on_hyphens=False)
        print("\n".join(["", name, *_indented([patch.why], width)]))
    print("\n" + textwrap.fill(JUDGEMENT, width))
    for one in ORDER:
        print("\n".join(["", one.name, *_indented([one.when, f"→ {one.follows}"], width)]))
    return 0


def width_of_lines() -> int:
    """Characters of a line: those of the terminal, or COLUMNS, and no more than are read with ease."""
    return max(20, min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS))


def _indented(paragraphs: Iterable[str], width: int) -> Iterable[str]:
    for text in paragraphs:
        yield textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
