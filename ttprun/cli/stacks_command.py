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
from ttprun.observe.topology import Topology, read_topology
from ttprun.protocol.control_requests import TakeStacks
from ttprun.state.memory_share import in_words

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
        _show_stacks(report, answer.message)
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


# `ttprun topology`: which ranks hold the same, and what the loss of each would cost; without torch.


_MOST_PEERS = 8
_MOST_NAMES = 12
_LOSSES = {
    "peer": "replaced, no step lost",
    "buddy": "replaced from its mirror, no step lost",
    "snapshot": "all ranks go back to the newest snapshot",
    "restart": "all ranks start again",
}


def topology(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
) -> int:
    """Show which ranks hold the same weights and optimizer state, and from where a lost rank would get its own.

    Coordinates are those in the script's device meshes. Without a mesh they are those in its process groups: ep, cp
    and pp if what the ranks send each other shows experts, context or a pipeline. Who holds the same was compared by
    digests in the first steps, not assumed.
    """
    directory = RunDirectory.find(run)
    try:
        shown = read_topology(directory.topology)
    except FileNotFoundError:
        why = f"the ranks of the run in '{directory.path}' have not been compared yet"
        raise ConfigError(why, "this happens in the first two steps; try again then") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the topology cannot be read ({error})", "name another run") from None
    if as_json:
        print(shown.to_json(), flush=True)
    else:
        _show_topology(shown)
    return 0


def _show_topology(shown: Topology) -> None:
    from ttprun.cli.terminal import new_table, open_console

    console = open_console()
    for name, members in shown.groups.items():
        console.print(f"{name} = {{{', '.join(map(str, members))}}}")
    dimensions = list(dict.fromkeys(name for rank in shown.ranks for name in rank.coordinates))
    mirror = ("mirror",) if any(rank.mirror_bytes for rank in shown.ranks) else ()
    numbers = ("rank", *dimensions, *mirror)
    table = new_table(console, "rank", *dimensions, "replica peers", *mirror, "if it is lost", right=numbers)
    for rank in shown.ranks:
        coordinates = [str(rank.coordinates.get(name, "-")) for name in dimensions]
        peers = in_short([*map(str, shown.peers(rank.rank))], _MOST_PEERS) or "-"
        size = [in_words(rank.mirror_bytes) if rank.mirror_bytes else "-"] if mirror else []
        table.add_row(str(rank.rank), *coordinates, peers, *size, _LOSSES[rank.loss])
    console.print(table)
    if not shown.unequal:
        console.print(f"all ranks hold the same (compared at step {shown.boundary})")
        return
    unequal = in_short(shown.unequal, _MOST_NAMES)
    console.print(f"not the same in all ranks (compared at step {shown.boundary}): {unequal}")
    for part in shown.parts:
        holders = " | ".join(in_short([*map(str, ranks)], _MOST_PEERS) for ranks in part.holders[:_MOST_PEERS])
        more = f" and {len(part.holders) - _MOST_PEERS} more parts" if len(part.holders) > _MOST_PEERS else ""
        console.print(f"parts held by ranks {holders}{more}: {in_short(part.names, _MOST_NAMES)}")
    if any(rank.loss in ("snapshot", "restart") for rank in shown.ranks):
        console.print(
            "A shard with one holder is gone with its rank. A mesh of 2 replicas (HSDP, tensor x data parallel) "
            "gives each a second holder; --snapshot-every says how many steps are lost otherwise."
        )
