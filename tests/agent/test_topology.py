"""Who holds what: groups that ranks report, and comparisons, as `ttprun topology` shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttprun.agent.report.topology import dimensions_of, topology_of
from ttprun.observe.topology import read_topology, write_topology
from ttprun.protocol.from_rank import Group
from ttprun.recovery.replicas import Replicas

TENSOR = [[0, 1, 2, 3], [4, 5, 6, 7]]
DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("is_named", [True, False])
def test_four_by_two_ranks_come_out_as_the_mesh_or_the_groups_of_the_script_have_them(is_named: bool) -> None:
    """The example of ColossalAI's process group mesh."""
    tensor, data = ("tp", "dp") if is_named else ("", "")
    groups = [Group(tensor, ranks) for ranks in TENSOR] + [Group(data, ranks) for ranks in DATA]
    owners = (0, 1, 2, 3, 0, 1, 2, 3)

    found = topology_of(Replicas(compared_at=1, shards={"w": owners}), [*groups, Group("", [*range(8)])], 8, "snapshot")

    first, second = ("tp0", "dp1") if is_named else ("stride1_0", "stride4_1")
    assert (found.groups[first], found.groups[second]) == ((0, 1, 2, 3), (1, 5))
    assert list(found.ranks[6].coordinates.values()) == ([1, 2] if is_named else [2, 1])
    assert [(found.peers(rank), found.ranks[rank].loss) for rank in (0, 5)] == [((4,), "peer"), ((1,), "peer")]


def test_what_one_rank_holds_alone_costs_a_snapshot() -> None:
    found = topology_of(Replicas(compared_at=1, shards={"w": (0, 1)}, names={"w": "up.weight"}), [], 2, "snapshot")

    assert [(found.peers(rank.rank), rank.loss) for rank in found.ranks] == [((), "snapshot"), ((), "snapshot")]
    assert found.apart == ("up.weight",)


def test_without_shards_all_ranks_are_peers() -> None:
    found = topology_of(Replicas(compared_at=1), [], 3, "snapshot")

    assert [found.peers(rank) for rank in range(3)] == [(1, 2), (0, 2), (0, 1)]


def test_groups_that_do_not_part_the_ranks_are_no_dimension() -> None:
    assert dimensions_of([Group("", [0, 1]), Group("", [1, 2])], 4) == {}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = topology_of(Replicas(compared_at=1, shards={"w": (0, 1, 0, 1)}), [Group("tp", [0, 1])], 4, "restart")

    write_topology(tmp_path / "topology.json", written)

    assert read_topology(tmp_path / "topology.json") == written
