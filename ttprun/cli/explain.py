"""`ttprun explain`: what ttprun changes inside the user's process, how it judges variables, and what a reason means."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Annotated

import typer

from ttprun.errors import ConfigError, suggestion
from ttprun.protocol.reason import WORDS, Reason
from ttprun.protocol.reasons import KINDS, REASONS, reason_of

MEANING = (
    "ttprun does not change your files: it wraps the functions below inside each rank's process, to record what a "
    "replacement of that rank needs and to rebuild its connections."
)
JUDGEMENT = (
    "When a rank is replaced, each variable of the script is judged by the first line that fits; behind the arrow, "
    "what follows from it."
)
KINDS_OF_REASONS = (
    "Why a rank is not replaced, or not proved, has one of these kinds; 'ttprun explain KIND' explains one."
)
_MOST_COLUMNS = 100


def explain(
    reason: Annotated[
        list[str] | None, typer.Argument(help="A kind of reason, as journal-full, or a message, in quotes.")
    ] = None,
) -> int:
    """Show what ttprun changes inside your process, and why; and how it judges your variables.

    Your files are never changed. With a reason that ttprun has given: what it means, what ttprun does then, and what
    helps. Exit code: 0, or 2 if the reason is not known.
    """
    if reason:
        explain_reason(find_reason(" ".join(reason)))
    else:
        explain_changes()
    return 0


def find_reason(text: str) -> Reason:
    """The reason of this kind, or of this message. Raises ConfigError if there is none."""
    row = KINDS.get(text) or reason_of(" ".join(text.split()))
    if row is None:
        cure = suggestion(text, KINDS, "")
        words = set(re.findall(r"[a-z]{4,}", text.lower()))
        alike = {
            reason.kind: len(words & set(re.findall(r"[a-z]{4,}", f"{reason.kind} {reason.means}")))
            for reason in REASONS
        }
        nearest = max(alike, key=alike.__getitem__)
        cure = cure or (f"did you mean '{nearest}'?" if alike[nearest] else "'ttprun explain' lists the kinds")
        raise ConfigError(f"no reason is known as '{text[:80]}'", cure)
    return row


def explain_reason(row: Reason) -> None:
    """Print a row of the table of reasons."""
    topic, _, heading = row.where.partition("#")
    width = width_of_lines()
    print(f"{row.kind}: {row.word}\n")
    print("\n".join(_indented([row.means], width)))
    for title, text in (
        ("what ttprun does then", row.then or WORDS[row.word]),
        ("what helps", row.cure),
        ("more", f"ttprun guide {topic}, under '{heading}'"),
    ):
        print("\n".join(["", title, *_indented([text], width)]))


def explain_changes() -> None:
    """Print the tables of what is changed, of how variables are judged, and the kinds of reasons."""
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
    for rule in ORDER:
        print("\n".join(["", rule.name, *_indented([rule.when, f"→ {rule.follows}"], width)]))
    print("\n" + textwrap.fill(KINDS_OF_REASONS, width))
    for word in WORDS:
        kinds = ", ".join(row.kind for row in REASONS if row.word == word)
        print("\n".join(["", word, *_indented([kinds], width)]))


def width_of_lines() -> int:
    """Characters of a line: those of the terminal, or COLUMNS, and no more than are read with ease."""
    return max(20, min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS))


def _indented(paragraphs: Iterable[str], width: int) -> Iterable[str]:
    for text in paragraphs:
        yield textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
