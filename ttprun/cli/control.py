"""Ask a run's agent for something, by the control socket in the run's directory."""

from __future__ import annotations

import json
import socket
from typing import Any

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.requests import Request

ANSWER_LIMIT_S = 10.0


def ask(directory: RunDirectory, request: Request) -> dict[str, Any]:
    """The agent's answer, one line of JSON each way: {"ok": true, ...} or {"ok": false, "error": why not}.

    Waits at most ANSWER_LIMIT_S. Raises ConfigError if there is no answer.
    """
    try:
        request_line = {"op": type(request).__name__, "token": directory.read_token(), **vars(request)}
        with (
            directory.control_address() as address,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(ANSWER_LIMIT_S)
            connection.connect(address)
            connection.sendall(json.dumps(request_line).encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as lines:
                answer = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the run's agent does not answer ({error})", "see 'ttprun status'") from None
    if not isinstance(answer, dict):
        raise ConfigError(f"the run's agent does not answer ({answer!r} is no answer)", "see 'ttprun status'")
    return answer
