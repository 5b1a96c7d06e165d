"""`ttprun recall`: have ranks that are away train again. Without torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ttprun.cli.control import ask_running
from ttprun.protocol.requests import Recall


def recall(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Call back ranks that are away (--mindio, rung resize): they get new processes and are repaired.

    Exit code: 0 they are on their way (see 'ttprun status'), 2 nobody is away, or they cannot come now.
    """
    directory, answer = ask_running(run, Recall(), "no rank was called back")
    described = {"run": str(directory.path), "ok": True, "message": answer.message}
    print(json.dumps(described) if as_json else answer.message)
    return 0
