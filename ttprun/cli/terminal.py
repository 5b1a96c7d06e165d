"""Where commands print: in colour and to the terminal's width on a terminal, plain and never wrapped in a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ttprun.cli.alike import ALIKE

# Wider than any line of ours, so that rich neither wraps nor cuts what another program will read.
_PIPE_COLUMNS = 100_000


def open_console() -> Console:
    """A console on stdout as it is now; in a pipe it writes no control codes, whatever the environment asks for."""
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
    return Measurement.get(console, console.options.update_width(_PIPE_COLUMNS), table).maximum
