"""`ttprun inject-fault`: break one rank of a running job on purpose, to see it recover. Without torch."""

from __future__ import annotations

import json
import socket
from typing import Annotated

import typer

from ttprun.cli.terminal import new_table, open_console
from ttprun.config import read_config_file, resolve
from ttprun.errors import ConfigError
from ttprun.faults import KINDS, PHASES, Fault, check_word
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status

ANSWER_LIMIT_S = 10.0


def inject_fault(
    kind: Annotated[str, typer.Argument(help="Kind of fault; 'list' shows all kinds and phases.")],
    rank: Annotated[int | None, typer.Option(help="Global rank in which it strikes.")] = None,
    at_step: Annotated[int | None, typer.Option(help="Optimizer step, from 0; default: the running one.")] = None,
    phase: Annotated[str | None, typer.Option(help="Phase of the step; default: wherever the rank is.")] = None,
    run: Annotated[str | None, typer.Option(help="Run id or run directory; default: the newest run here.")] = None,
) -> int:
    """Cause a fault in one rank of a run that was started with --allow-faults.

    For example: ttprun inject-fault kill --rank 1 --at-step 20 --phase backward
    """
    if kind == "list":
        print_words()
        return 0
    fault = read_fault(kind, rank, at_step, phase)
    directory = RunDirectory.find(run)
    check_run(directory, fault)
    print(send_fault(directory, fault))
    return 0


def print_words() -> None:
    """Print the kinds and phases of faults."""
    console = open_console()
    for title, words in (("kind", KINDS), ("phase", PHASES)):
        table = new_table(console, title, "what happens" if title == "kind" else "when it strikes")
        for word, meaning in words.items():
            table.add_row(word, meaning)
        console.print(table)


def read_fault(kind: str, rank: int | None, at_step: int | None, phase: str | None) -> Fault:
    """The fault that the command line describes. Raises ConfigError."""
    try:
        check_word("fault", kind, KINDS)
        if phase is not None:
            check_word("phase", phase, PHASES)
    except ValueError as error:
        raise ConfigError(*str(error).split("; ", 1)) from None
    if rank is None:
        raise ConfigError("no rank is named", "add --rank R")
    for option, value in (("--rank", rank), ("--at-step", at_step)):
        if value is not None and value < 0:
            raise ConfigError(f"{option}: {value} is below 0", "give a whole number from 0")
    return Fault(kind, rank, at_step, phase)


def check_run(directory: RunDirectory, fault: Fault) -> None:
    """The run must live, allow faults and have that rank. Raises ConfigError."""
    try:
        status = read_status(directory.status)
        config = resolve([read_config_file(str(directory.config))], {}, {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"run '{directory.path}' cannot be read ({error})", "name another with --run") from None
    if status.has_ended:
        ending = f"failed: {status.reason}" if status.reason else status.state
        raise ConfigError(f"run {status.run_id} has ended ({ending})", "name a running one with --run")
    if not config.allow_faults:
        raise ConfigError(f"run {status.run_id} does not allow faults", "start it with --allow-faults")
    if fault.rank >= status.world_size:
        raise ConfigError(
            f"--rank: run {status.run_id} has no rank {fault.rank}", f"name one from 0 to {status.world_size - 1}"
        )


def send_fault(directory: RunDirectory, fault: Fault) -> str:
    """Ask the run's agent to cause the fault; returns its answer. Waits at most ANSWER_LIMIT_S. Raises ConfigError.

    One line of JSON each way: {"token", "op": "inject_fault", "fault"}, then {"ok": true, "message"} or
    {"ok": false, "error"}.
    """
    try:
        request = {"token": directory.read_token(), "op": "inject_fault", "fault": str(fault)}
        with (
            directory.control_address() as address,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(ANSWER_LIMIT_S)
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as lines:
                answer = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the run's agent does not answer ({error})", "see 'ttprun status'") from None
    if not isinstance(answer, dict):
        raise ConfigError(f"the run's agent does not answer ({answer!r} is no answer)", "see 'ttprun status'")
    if not answer.get("ok"):
        raise ConfigError(f"the run refuses the fault: {answer.get('error')}", "see 'ttprun inject-fault list'")
    return str(answer.get("message"))
