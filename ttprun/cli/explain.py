"""`ttprun explain`: what ttprun changes inside the user's process, and how it judges the script's variables."""

from __future__ import annotations

from ttprun.cli.terminal import new_table, open_console


def explain() -> int:
    """Show what ttprun changes inside your process, and why; and how it judges your variables.

    Your files are never changed.
    """
    from ttprun.rank.bootstrap.patch_table import ALSO, PATCHES, Change, Patch
    from ttprun.rank.position.judgement import ORDER

    console = open_console()
    table = new_table(console, "module", "attribute", "why")
    rows: tuple[Patch | Change, ...] = (*PATCHES, *ALSO)
    for patch in rows:
        table.add_row(patch.module, patch.attribute, patch.why)
    console.print(table)
    console.print("\nHow a variable is judged when a rank is replaced: the first row that fits.")
    judged = new_table(console, "judged", "what it is", "what follows")
    for one in ORDER:
        judged.add_row(one.name, one.when, one.follows)
    console.print(judged)
    return 0
