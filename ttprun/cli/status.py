"""`ttprun status`: the state of a run, from the files in its directory, so also after its end; without torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Annotated

import typer
from pydantic import TypeAdapter

from ttprun.errors import ConfigError
from ttprun.observe.history import read_history
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, read_status

REFRESH_S = 0.5
EXIT_CODES = {"starting": 0, "healthy": 0, "done": 0, "stopped": 0, "recovering": 1, "restarting": 1, "failed": 2}


def status(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line, for programs.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json, of no run.")] = False,
) -> int:
    """Show a run's ranks and its incidents, with the seconds of each phase.

    Words such as generation, rung, boundary and standby are explained in 'ttprun guide glossary'.

    Exit code: 0 healthy, done, or stopped by Ctrl-C or another signal (or starting), 1 recovering, 2 failed.
    """
    if schema:
        print(json.dumps(TypeAdapter(RunStatus).json_schema(), indent=2))
        return 0
    directory = RunDirectory.find(run)
    shown = load(directory)
    if not watch:
        print_status(directory, shown, as_json)
    elif sys.stdout.isatty() and not as_json:
        shown = watch_on_terminal(directory, shown)
    else:
        for change in changes(directory, shown):
            shown = change
            print_status(directory, shown, as_json)
    return EXIT_CODES[shown.state]


def load(directory: RunDirectory) -> RunStatus:
    """Read the status of a run. Raises ConfigError if it has none."""
    try:
        return read_status(directory.status)
    except FileNotFoundError:
        raise ConfigError(f"the run in '{directory.path}' has not written a status", "look again in a second") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"status cannot be read ({error})", "name another run") from None


def changes(directory: RunDirectory, first: RunStatus) -> Iterator[RunStatus]:
    """Yield the status, then again whenever more than steps and times has changed, until the run has ended."""
    shown = first
    yield shown
    while not shown.has_ended:
        time.sleep(REFRESH_S)
        new = load(directory)
        if _gist(new) != _gist(shown):
            shown = new
            yield shown


def watch_on_terminal(directory: RunDirectory, first: RunStatus) -> RunStatus:
    """Keep one picture up to date until the run has ended; returns the last status."""
    from rich.live import Live

    from ttprun.cli.status_picture import draw
    from ttprun.cli.terminal import open_console

    shown = first
    console = open_console()
    with Live(draw(console, shown, speeds(directory, shown)), console=console, auto_refresh=False) as live:
        while not shown.has_ended:
            time.sleep(REFRESH_S)
            shown = load(directory)
            live.update(draw(console, shown, speeds(directory, shown)), refresh=True)
    return shown


def speeds(directory: RunDirectory, shown: RunStatus) -> list[float]:
    """Steps per second between the moments that the history of this launch knows, after the first step."""
    started_s = datetime.fromisoformat(shown.started_at).timestamp()
    points = [point for point in read_history(directory.history, started_s) if point.step]
    return [
        max(0, after.step - before.step) / (after.unix_s - before.unix_s)
        for before, after in pairwise(points)
        if after.unix_s > before.unix_s
    ]


def print_status(directory: RunDirectory, shown: RunStatus, as_json: bool) -> None:
    """Print one status; at once, also into a pipe.

    directory   of the run, for its history of speeds
    as_json     one line of JSON for programs, instead of a picture for people
    """
    if as_json:
        print(shown.to_json(), flush=True)
        return
    from ttprun.cli.status_picture import draw
    from ttprun.cli.terminal import open_console

    console = open_console()
    console.print(draw(console, shown, speeds(directory, shown)))
    console.file.flush()


def _gist(shown: RunStatus) -> tuple[object, ...]:
    pids = tuple(rank.pid for rank in shown.ranks)
    return shown.state, shown.generation, shown.incidents, shown.protection, shown.away, pids
