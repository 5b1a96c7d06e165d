"""Where commands print: in colour and to the terminal's width on a terminal, plain and never wrapped in a pipe."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

# Wider than any line of ours, so that rich neither wraps nor cuts what another program will read.
_PIPE_COLUMNS = 100_000


def open_console() -> Console:
    """A console on stdout as it is now; in a pipe it writes no control codes, whatever the environment asks for."""
    # No markup: what we print may hold brackets of its own, such as a rank's error message.
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False, markup=False)
    return Console(
        highlight=False, emoji=False, markup=False, force_terminal=False, color_system=None, width=_PIPE_COLUMNS
    )


def new_table(console: Console, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with these headings; those in `right` hold numbers. In a pipe: plain columns without lines."""
    table = Table(box=box.ROUNDED if console.is_terminal else None, header_style="bold", pad_edge=console.is_terminal)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not console.is_terminal)
    return table
