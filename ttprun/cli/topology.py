"""`ttprun topology`: which ranks hold the same, and what the loss of each would cost; without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from ttprun.errors import ConfigError, in_short
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.topology import Topology, read_topology

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

    Coordinates are those in the script's device meshes (or, without a mesh, in its process groups). Who holds the same
    was compared by digests in the first steps, not assumed.
    """
    directory = RunDirectory.find(run)
    try:
        found = read_topology(directory.topology)
    except FileNotFoundError:
        why = f"the ranks of the run in '{directory.path}' have not been compared"
        raise ConfigError(why, "they are at the first two steps; look again then, or see 'ttprun status'") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the topology cannot be read ({error})", "name another run") from None
    if as_json:
        print(found.to_json(), flush=True)
    else:
        _show(found)
    return 0


def _show(found: Topology) -> None:
    from ttprun.cli.terminal import new_table, open_console

    console = open_console()
    for name, members in found.groups.items():
        console.print(f"{name} = {{{', '.join(map(str, members))}}}")
    dimensions = list(dict.fromkeys(name for rank in found.ranks for name in rank.coordinates))
    table = new_table(console, "rank", *dimensions, "replica peers", "if it is lost", right=("rank", *dimensions))
    for rank in found.ranks:
        coordinates = [str(rank.coordinates.get(name, "-")) for name in dimensions]
        peers = in_short([*map(str, found.peers(rank.rank))], _MOST_PEERS) or "-"
        table.add_row(str(rank.rank), *coordinates, peers, _LOSSES[rank.loss])
    console.print(table)
    if not found.apart:
        console.print(f"all ranks hold the same (compared at step {found.boundary})")
        return
    apart = in_short(found.apart, _MOST_NAMES)
    console.print(f"not the same in all ranks (compared at step {found.boundary}): {apart}")
    if any(len(ranks) == 1 for ranks in found.replicas):
        console.print(
            "A shard with one holder is gone with its rank. A mesh of 2 replicas (HSDP, tensor x data parallel) "
            "gives each a second holder; --snapshot-every says how many steps are lost otherwise."
        )
