"""`ttprun recall`: have ranks that are away train again. Without torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ttprun.cli.control import ask
from ttprun.cli.status import load
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.requests import Recall, Rejected


def recall(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Call back ranks that are away (--mindio, rung resize): they get new processes and are repaired.

    Exit code: 0 they are on their way (see 'ttprun status'), 2 nobody is away, or they cannot come now.
    """
    directory = RunDirectory.find(run)
    before = load(directory)
    if before.has_ended:
        raise ConfigError(f"run {before.run_id} has ended ({before.state})", "name a running one")
    answer = ask(directory, Recall())
    if isinstance(answer, Rejected):
        raise ConfigError(f"no rank was called back: {answer.error}", "see 'ttprun status'")
    print(
        json.dumps({"run": str(directory.path), "ok": True, "message": answer.message}) if as_json else answer.message
    )
    return 0
