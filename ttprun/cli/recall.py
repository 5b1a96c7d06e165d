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
    """Re-admit ranks that left the job (--mindio): they get new processes and the state of the others.

    Exit code: 0 they are being started (see 'ttprun status'), 2 no rank has left, or none can be started now.
    """
    directory, answer = ask_running(run, Recall(), "no rank was called back")
    described = {"run": str(directory.path), "ok": True, "message": answer.message}
    print(json.dumps(described) if as_json else answer.message)
    return 0
