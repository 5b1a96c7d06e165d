"""What a running job's agent is asked for, by the control socket in the run's directory.

`ttprun stacks`, `recall`, `move`, `drain` and `inject-fault`. Begin with `ask`. Without torch.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated, TypeVar, get_args

import typer
from msgspec import structs

from ttprun.chaos.injected_faults import (
    KINDS,
    PHASES,
    Fault,
    PlannedStrike,
    check_ranks,
    parse_fault,
    phases_of,
    strikes,
)
from ttprun.cli.terminal import new_table, open_console
from ttprun.errors import ConfigError, in_short
from ttprun.observe.console import ProgressLine
from ttprun.observe.run_directory import RunDirectory, StackReport, groups_of, read_stacks
from ttprun.observe.run_view import load
from ttprun.observe.status import BEING_PREPARED, IMPORTS_FOLLOW, IncidentStatus, RunStatus
from ttprun.protocol.codec import Refused, decode
from ttprun.protocol.control_requests import (
    Accepted,
    DrainNode,
    InjectFault,
    MoveRanks,
    Recall,
    Rejected,
    Reply,
    Request,
    TakeStacks,
)

T = TypeVar("T")
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
        request_line = {"op": type(request).__name__, "token": directory.read_token(), **structs.asdict(request)}
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


# `ttprun stacks`: where each rank is now, equal stacks together.


_STACKS_LIMIT_S = 10.0
_STANDBY_LIMIT_S = 30.0  # without one a move only takes longer
_LOOK_AGAIN_S = 0.02
_MOST_RANKS = 16


def stacks(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank, with all of its threads; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
) -> int:
    """Show where each rank of this node is in its Python code, without stopping any. Equal stacks are shown once.

    Ranks that are not waiting for others are listed first: if a job hangs, look there. On several nodes, ask on each.
    """
    directory, answer = ask_running(run, TakeStacks(), "no stacks")
    report = _wait_for(directory, answer.after)
    if rank:
        _check_ranks(report, rank, answer.message)
        report = StackReport(report.number, report.at, tuple(stack for stack in report.ranks if stack.rank in rank))
    if as_json:
        print(report.to_json())
    elif rank:
        print("\n\n".join(f"rank {stack.rank}, pid {stack.pid}\n{stack.all_threads.strip()}" for stack in report.ranks))
    else:
        _show_stacks(report, answer.message)
    return 0


def _wait_for(directory: RunDirectory, after: int) -> StackReport:
    """The first report whose number is above `after`. Raises ConfigError if none comes."""
    give_up_at_s = time.monotonic() + _STACKS_LIMIT_S
    while time.monotonic() < give_up_at_s:
        with suppress(FileNotFoundError):
            report = read_stacks(directory.stacks)
            if report.number > after:
                return report
        time.sleep(_LOOK_AGAIN_S)
    why = f"no stacks have come within {_STACKS_LIMIT_S:.0f} s"
    raise ConfigError(why, "see 'stacks_not_written' in events.jsonl of the run directory")


def _check_ranks(report: StackReport, wanted: list[int], elsewhere: str) -> None:
    there = [stack.rank for stack in report.ranks]
    missing = [str(number) for number in wanted if number not in there]
    if missing:
        listed = in_short([*map(str, there)], _MOST_RANKS) or "none"
        cure = elsewhere or "a lost or finished rank has none"
        raise ConfigError(f"no stack of rank {', '.join(missing)}; there are those of {listed}", cure)


def _show_stacks(report: StackReport, elsewhere: str) -> None:
    for group in groups_of(report.ranks):
        ranks = in_short([*map(str, group.ranks)], _MOST_RANKS)
        print(f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}: {group.place}")
        print(group.main or "  no Python frame of the script")
        print()
    if not report.ranks:
        print("no rank of this node is running")
    if elsewhere:
        print(elsewhere)


# `ttprun recall`: have ranks that are away train again.


def recall(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Re-admit ranks that left the job (--mindio): they get new processes and the state of the others.

    Exit code: 0 they are being started (see 'ttprun status'), 2 no rank has left, or none can be started now.
    """
    directory, answer = ask_running(run, Recall(), "no rank was called back")
    print(
        json.dumps({"run": str(directory.path), "ok": True, "message": answer.message}) if as_json else answer.message
    )
    return 0


# `ttprun move` and `ttprun drain`: healthy ranks give their places to new processes.


_Run = Annotated[str | None, typer.Option(help="Run id or run directory; default: the newest run here.")]
_Anyway = Annotated[bool, typer.Option("--anyway", help="Also if not all that a rank holds is known to come back.")]


def move(
    rank: Annotated[list[int], typer.Argument(help="Global rank; several are moved at once.")],
    run: _Run = None,
    anyway: _Anyway = False,
    end_first: Annotated[
        bool,
        typer.Option("--end-first", help="End the old process first: it has a port or file that the new one needs."),
    ] = False,
    to_device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Another one of its node, as in CUDA_VISIBLE_DEVICES; no rank has it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Give a healthy rank a new process, and wait until it trains: a standby takes its step again from its record.

    For a rank that is slower than the others, or has a process or a device that you do not trust. The others wait as
    long as for the repair of a lost rank; no step is lost. If it fails, the old process trains on (but not on a machine
    with GPUs or NPUs, where it is ended first, unless the new one gets another device).

    Exit code: 0 the new process trains, 1 the job had to go another way, 2 refused: the rank trains on as it is.
    """
    request = MoveRanks(tuple(sorted({*rank})), end_first, to_device)
    if to_device and len(request.ranks) > 1:
        raise ConfigError("--to-device moves one rank", "name one, and ask again for the next")
    return _change(request, run, anyway, as_json, f"moving rank {', '.join(map(str, rank))}")


def drain(
    node: Annotated[int, typer.Argument(help="Number of the node, as in 'ttprun status'.")],
    run: _Run = None,
    anyway: _Anyway = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Let a node that waits take the place of one that trains, for maintenance; ask on the node whose agent leads.

    All ranks stand still after a step; then the node's launcher ends, and its ranks start on the other node from their
    copied records. It may come back as a spare. The node that leads cannot be drained. In a job's last step nothing
    happens.

    Exit code: 0 the other node trains, 1 the job had to go another way, 2 refused: the node trains on as it is.
    """
    return _change(DrainNode(node), run, anyway, as_json, f"draining node {node}")


def _change(request: MoveRanks | DrainNode, run: str | None, anyway: bool, as_json: bool, what: str) -> int:
    """Ask, wait for the incident to come to its end, and say how it went."""
    directory = RunDirectory.find(run)
    unproved = load(directory).not_proved
    if unproved and not anyway:
        raise ConfigError(f"not begun: {in_short(list(unproved), 2)} would perhaps not come back", "--anyway moves it")
    gives_up_s = time.monotonic() + (_STANDBY_LIMIT_S if isinstance(request, MoveRanks) else 0.0)
    early = (BEING_PREPARED, IMPORTS_FOLLOW)
    with ProgressLine("waiting for a standby", 0, lambda: 0):
        while time.monotonic() < gives_up_s and load(directory).standby_state.endswith(early):
            time.sleep(_LOOK_AGAIN_S)
    directory, answer = ask_running(str(directory.path), request, "not begun")
    with ProgressLine(what, 0, lambda: 0):
        incident = wait_until(directory, lambda status: _first_over(status, answer.after))
    if as_json:
        print(json.dumps(dataclasses.asdict(incident)))
    else:
        took = f"{incident.outcome} in {incident.total_s or 0.0:.2f} s ({incident.rung})"
        print(f"{incident.reason}: {took}, {incident.steps_lost} steps lost")
    is_done = (incident.rung, incident.outcome) == ("replace", "recovered") and {*answer.ranks} <= {*incident.ranks}
    return 0 if is_done else 1


def _first_over(status: RunStatus, after: int) -> IncidentStatus | None:
    """The first incident above this number, when it is over."""
    return next((one for one in status.incidents if one.id > after and one.outcome != "open"), None)


def wait_until(directory: RunDirectory, found_in: Callable[[RunStatus], T | None]) -> T:
    """What is found in a run's status, once there is something. Raises ConfigError if the run ends before."""
    while True:
        status = load(directory)
        if (found := found_in(status)) is not None:
            return found
        if status.has_ended:
            raise ConfigError(f"run {status.run_id} has ended without it ({status.reason})", "see 'ttprun status'")
        time.sleep(_LOOK_AGAIN_S)


# `ttprun inject-fault`: break a running job on purpose, to see it recover.


# Of a schedule without end, so many strikes are shown.
SHOWN_STRIKES = 20


def inject_fault(
    kind: Annotated[
        str, typer.Argument(help="Kind of fault; several with commas, or 'random', with --seed; 'list' shows them all.")
    ],
    rank: Annotated[int | None, typer.Option(help="Global rank in which it strikes.")] = None,
    at_step: Annotated[int | None, typer.Option(help="Optimizer step, from 0; default: the running one.")] = None,
    phase: Annotated[str | None, typer.Option(help="Phase of the step; default: wherever the rank is.")] = None,
    after: Annotated[float | None, typer.Option(help="Seconds to wait first.")] = None,
    every: Annotated[str | None, typer.Option(help="Repeat: every 10s (seconds) or 5steps.")] = None,
    count: Annotated[int | None, typer.Option(help="How often; default: once, with --every without end.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw what is not given, the same each time: rank, phase, step.")
    ] = None,
    code: Annotated[int | None, typer.Option(help="Exit code, for exit.")] = None,
    peer: Annotated[int | None, typer.Option(help="Other end of the link, for reset, silent and slow.")] = None,
    rate: Annotated[int | None, typer.Option(help="Bytes a second, for slow.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long a hang or a broken link lasts.")] = None,
    run: Annotated[str | None, typer.Option(help="Run id or run directory; default: the newest run here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Cause a fault in a run that was started with --allow-faults, once or by a schedule.

    For example: ttprun inject-fault kill --rank 1 --at-step 20 --phase backward

    A storm: ttprun inject-fault random --seed 7 --every 10s --count 5 (see it first with --dry-run)

    The same is written in one word for --fault and for configurations: random:every=10s,count=5,seed=7
    """
    if kind == "list":
        print_words(as_json)
        return 0
    values = {"rank": rank, "step": at_step, "phase": phase, "after": after, "every": every, "count": count}
    values |= {"seed": seed, "code": code, "peer": peer, "rate": rate, "seconds": seconds}
    fault = read_fault(kind, values)
    if dry_run:
        show_strikes(load(RunDirectory.find(run)), fault, as_json)
        return 0
    directory, answer = ask_running(run, InjectFault(str(fault)), "the run refuses the fault")
    said = {"run_id": load(directory).run_id, "fault": str(fault), "dry_run": False, "message": answer.message}
    print(json.dumps(said) if as_json else answer.message)
    return 0


def print_words(as_json: bool) -> None:
    """Print the kinds and phases of faults."""
    if as_json:
        kinds = {kind: {"what": meaning, "phases": phases_of(kind)} for kind, meaning in KINDS.items()}
        print(json.dumps({"kinds": kinds, "phases": PHASES}))
        return
    console = open_console()
    for title, words in (("kind", KINDS), ("phase", PHASES)):
        table = new_table(console, title, "what happens" if title == "kind" else "when it strikes")
        for word, meaning in words.items():
            table.add_row(word, meaning)
        console.print(table)


def read_fault(kind: str, values: Mapping[str, object]) -> Fault:
    """The fault that the command line describes; `values` has the keys of Fault. Raises ConfigError."""
    given = ",".join(f"{key}={value}" for key, value in values.items() if value is not None)
    try:
        return parse_fault(f"{kind}:{given}")
    except ValueError as error:
        raise ConfigError(*str(error).split("; ", 1)) from None


def show_strikes(status: RunStatus, fault: Fault, as_json: bool) -> None:
    """Print what an order would cause if it were given now: SHOWN_STRIKES at most. Raises ConfigError as `read_fault`.

    status    of the run, for its number of ranks and its step
    fault     the order, a fault or a schedule
    as_json   one line of JSON instead of a table
    """
    try:
        check_ranks(fault, status.world_size)
    except ValueError as error:
        raise ConfigError(*str(error).split("; ", 1)) from None
    running_step = max((rank.step or 0 for rank in status.ranks), default=0)
    coming = list(islice(strikes(fault, status.world_size, running_step), SHOWN_STRIKES + 1))
    shown, has_more = coming[:SHOWN_STRIKES], len(coming) > SHOWN_STRIKES
    if as_json:
        planned = [{"after_s": strike.after_s} | _given(strike.fault) for strike in shown]
        print(json.dumps({"run_id": status.run_id, "fault": str(fault), "dry_run": True, "strikes": planned}))
        return
    console = open_console()
    console.print(f"run {status.run_id}, step {running_step}: dry run, nothing is done; the order would be")
    table = new_table(
        console, "#", "after", "kind", "rank", "step", "phase", "with", right=("#", "after", "rank", "step")
    )
    for strike in shown:
        table.add_row(*_row(strike))
    console.print(table)
    if has_more:
        console.print("... and so on")


def _row(strike: PlannedStrike) -> tuple[str, ...]:
    fault = strike.fault
    own = {key: value for key, value in _given(fault).items() if key not in ("kind", "rank", "step", "phase")}
    after = "at once" if strike.after_s is None and strike.number == 0 else "the one before"
    return (
        str(strike.number + 1),
        after if strike.after_s is None else f"{strike.after_s:g} s",
        fault.kind,
        *("-" if value is None else str(value) for value in (fault.rank, fault.step, fault.phase)),
        " ".join(f"{key}={value}" for key, value in own.items()) or "-",
    )


def _given(fault: Fault) -> dict[str, object]:
    return {key: value for key, value in dataclasses.asdict(fault).items() if value is not None}
