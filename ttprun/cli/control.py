"""Ask a run's agent for something, by the control socket in the run's directory."""

from __future__ import annotations

import json
import socket
from typing import get_args

from msgspec.structs import asdict

from ttprun.cli.status_command import load
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.codec import Refused, decode
from ttprun.protocol.control_requests import Accepted, Rejected, Reply, Request

ANSWER_LIMIT_S = 10.0
_REPLIES = {kind.__name__: kind for kind in get_args(Reply)}


def ask_running(run: str | None, request: Request, refusal: str) -> tuple[RunDirectory, Accepted]:
    """Ask the agent of a run that lives; returns the run's directory, and the answer.

    run       id or directory; None: the newest run here
    refusal   what is said before the reason if the agent refuses

    Raises ConfigError as `ask` does, and if there is no such run, it has ended, or its agent refuses.
    """
    directory = RunDirectory.find(run)
    before = load(directory)
    if before.has_ended:
        raise ConfigError(f"run {before.run_id} has ended ({before.state})", "name a running one")
    answer = ask(directory, request)
    if isinstance(answer, Rejected):
        raise ConfigError(f"{refusal}: {answer.error}", "see 'ttprun status'")
    return directory, answer


def ask(directory: RunDirectory, request: Request) -> Reply:
    """The agent's answer, one line of JSON each way.

    Waits at most ANSWER_LIMIT_S. Raises ConfigError if there is no answer.
    """
    try:
        request_line = {"op": type(request).__name__, "token": directory.read_token(), **asdict(request)}
        with (
            directory.control_address() as address,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(ANSWER_LIMIT_S)
            connection.connect(address)
            connection.sendall(json.dumps(request_line).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer: Reply | Refused = decode(lines.readline(), _REPLIES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the run's agent does not answer ({error})", "see 'ttprun status'") from None
    if isinstance(answer, Refused):
        raise ConfigError(f"the run's agent does not answer ({answer.reason})", "see 'ttprun status'")
    return answer
