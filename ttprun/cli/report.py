"""`ttprun report`: a run after the fact, as one HTML file or as Markdown; from its directory alone, without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.web.report import as_html, as_markdown, read_run


def report(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File to write; -: standard output. Default: report.html.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown for a ticket; to standard output, unless -o names a file.")
    ] = False,
) -> int:
    """Write a report of a run: state, speed, where the time went, incidents with what was proved, and events.

    The HTML file is complete in itself and loads nothing from elsewhere.
    """
    found = read_run(RunDirectory.find(run))
    text = as_markdown(found) if markdown else as_html(found)
    target = output or ("-" if markdown else "report.html")
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written ({error.strerror})", "name another file with -o") from None
    print(f"{target}: {found.summary.sentence}")
    return 0
