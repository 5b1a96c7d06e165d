"""`ttprun stacks`: where each rank is now, equal stacks together; without torch."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from ttprun.cli.control import ask_running
from ttprun.errors import ConfigError, in_short
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.stacks import StackReport, groups_of, read_stacks
from ttprun.protocol.requests import TakeStacks

_LIMIT_S = 10.0
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
        _show(report, answer.message)
    return 0


def _wait_for(directory: RunDirectory, after: int) -> StackReport:
    """The first report whose number is above `after`. Raises ConfigError if none comes."""
    give_up_at_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < give_up_at_s:
        with suppress(FileNotFoundError):
            report = read_stacks(directory.stacks)
            if report.number > after:
                return report
        time.sleep(_LOOK_AGAIN_S)
    why = f"no stacks have come within {_LIMIT_S:.0f} s"
    raise ConfigError(why, "see 'stacks_not_written' in events.jsonl of the run directory")


def _check_ranks(report: StackReport, wanted: list[int], elsewhere: str) -> None:
    there = [stack.rank for stack in report.ranks]
    missing = [str(number) for number in wanted if number not in there]
    if missing:
        known = in_short([*map(str, there)], _MOST_RANKS) or "none"
        cure = elsewhere or "a lost or finished rank has none"
        raise ConfigError(f"no stack of rank {', '.join(missing)}; there are those of {known}", cure)


def _show(report: StackReport, elsewhere: str) -> None:
    for group in groups_of(report.ranks):
        ranks = in_short([*map(str, group.ranks)], _MOST_RANKS)
        print(f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}: {group.place}")
        print(group.main or "  no Python frame of the script")
        print()
    if not report.ranks:
        print("no rank of this node is running")
    if elsewhere:
        print(elsewhere)
