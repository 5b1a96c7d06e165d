"""A command's output, which may lack characters, a reader or room. Begin with `CommandOutput` and `open_console`.

`ALIKE` writes what looks alike in place of our dots, dashes and arrows where a stream's encoding lacks them. rich is
imported only when a console is opened: whatever starts a job passes here.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


PIPE_CLOSED = 141  # 128 + SIGPIPE, as the shell's own commands end

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


class CommandOutput(io.FileIO):
    """The file below stdout: a command whose output cannot be written ends at once.

    By SystemExit, which neither a library's answer to a closed pipe nor our own answer to a bug of ours takes up.
    """

    ends_the_command = True  # until ranks are about to be started: a job goes on without a reader

    def write(self, data: Any) -> int:
        """Write; after a failure nothing more, so that the end of Python does not fail as well."""
        try:
            return super().write(data)
        except OSError as error:
            if not self.ends_the_command:
                raise
            self.write = len  # type: ignore[method-assign,assignment]
            raise SystemExit(
                PIPE_CLOSED
                if isinstance(error, BrokenPipeError)
                else f"ttprun: error: the output cannot be written ({error.strerror})"
            ) from None


def through(stream: TextIO) -> TextIO:
    """A stream that writes to the same file, by way of `CommandOutput`."""
    return io.TextIOWrapper(
        io.BufferedWriter(CommandOutput(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.isatty(),
        write_through=bool(getattr(stream, "write_through", False)),
    )


# Wider than any line of ours, so that rich neither wraps nor cuts what another program will read.
_PIPE_COLUMNS = 100_000


def open_console() -> Console:
    """A console on stdout as it is now; in a pipe it writes no control codes, whatever the environment asks for."""
    from rich.console import Console

    # No markup: what we print may hold brackets of its own, such as a rank's error message.
    if sys.stdout.isatty():
        if isinstance(sys.stdout, io.TextIOWrapper) and not is_utf8(os.environ):
            sys.stdout.reconfigure(encoding="ascii", errors=ALIKE)
        return Console(highlight=False, emoji=False, markup=False)
    return Console(
        highlight=False, emoji=False, markup=False, force_terminal=False, color_system=None, width=_PIPE_COLUMNS
    )


def is_utf8(environment: Mapping[str, str]) -> bool:
    """Whether a terminal shows UTF-8: unless the locale is "C" in so many words, what Python has made of it says so.

    Python puts LC_CTYPE into its own environment where LANG is "C" or not set.
    """
    is_coerced = "UTF" in environment.get("LC_CTYPE", "").upper()
    named = environment.get("LC_ALL") or (not is_coerced and environment.get("LC_CTYPE")) or environment.get("LANG")
    return named not in ("C", "POSIX")


def new_table(console: Console, *columns: str, right: Collection[str] = ()) -> Table:
    """An empty table with these headings; those in `right` hold numbers. In a pipe: plain columns without lines."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED if console.is_terminal else None, header_style="bold", pad_edge=console.is_terminal)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not console.is_terminal)
    return table


def fitting_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[str] = (),
    spare: Sequence[str] = (),
) -> Table:
    """A table that fits the terminal: if need be without lines, then without some columns.

    columns   headings
    rows      as many cells each
    right     headings of columns that hold numbers
    spare     headings of columns that may be left out, the first one first
    """
    kept, rows, leaving = list(columns), list(rows), iter(spare)
    table = _filled(new_table(console, *kept, right=right), columns, rows)
    while _width(console, table) > console.width:
        if table.box is None:  # so it is without lines already
            left_out = next(leaving, None)
            if left_out is None:
                break
            kept.remove(left_out)
        table = new_table(console, *kept, right=right)
        table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
        table = _filled(table, columns, rows)
    return table


def _filled(table: Table, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The table with its columns' cells of these rows."""
    kept = [columns.index(str(column.header)) for column in table.columns]
    for row in rows:
        table.add_row(*(row[number] for number in kept))
    return table


def _width(console: Console, table: Table) -> int:
    """Characters of a line that is not wrapped."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update_width(_PIPE_COLUMNS), table).maximum
