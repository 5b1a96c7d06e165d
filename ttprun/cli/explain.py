"""`ttprun explain`: everything that ttprun changes inside the user's process, and why."""

from __future__ import annotations

from ttprun.cli.terminal import new_table, open_console


def explain() -> int:
    """Show what ttprun changes inside your process, and why. Your files are never changed."""
    from ttprun.rank.bootstrap.patches import ALSO, PATCHES, Change, Patch

    console = open_console()
    table = new_table(console, "module", "attribute", "why")
    rows: tuple[Patch | Change, ...] = (*PATCHES, *ALSO)
    for patch in rows:
        table.add_row(patch.module, patch.attribute, patch.why)
    console.print(table)
    return 0
