"""Who holds what: groups that ranks report, and comparisons, as `ttprun topology` shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ttprun.agent.lead.topology_report import dimensions_of, topology_of
from ttprun.observe.run_directory import replace_file
from ttprun.observe.status import ShardedParameters, read_topology
from ttprun.protocol.from_rank import Group
from ttprun.recovery import Saved, Settings, new_job
from ttprun.recovery.job import Job
from ttprun.recovery.replicas import Replicas

TENSOR = [[0, 1, 2, 3], [4, 5, 6, 7]]
DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]


def job_of(replicas: Replicas, ranks: int) -> Job:
    """A job that was compared."""
    return replace(new_job(Settings(world_size=ranks)), replicas=replicas, in_memory=(Saved(3),))


@pytest.mark.parametrize("is_named", [True, False])
def test_four_by_two_ranks_come_out_as_the_mesh_or_the_groups_of_the_script_have_them(is_named: bool) -> None:
    """The example of ColossalAI's process group mesh."""
    tensor, data = ("tp", "dp") if is_named else ("", "")
    groups = [Group(tensor, ranks) for ranks in TENSOR] + [Group(data, ranks) for ranks in DATA]
    owners = (0, 1, 2, 3, 0, 1, 2, 3)

    found = topology_of(job_of(Replicas(compared_at=1, shards={"w": owners}), 8), [*groups, Group("", [*range(8)])])

    first, second = ("tp0", "dp1") if is_named else ("stride1_0", "stride4_1")
    assert (found.groups[first], found.groups[second]) == ((0, 1, 2, 3), (1, 5))
    assert list(found.ranks[6].coordinates.values()) == ([1, 2] if is_named else [2, 1])
    assert [(found.peers(rank), found.ranks[rank].loss) for rank in (0, 5)] == [((4,), "peer"), ((1,), "peer")]


def test_what_one_rank_holds_alone_costs_a_snapshot() -> None:
    found = topology_of(job_of(Replicas(compared_at=1, shards={"w": (0, 1)}, names={"w": "up.weight"}), 2), [])

    assert [(found.peers(rank.rank), rank.loss) for rank in found.ranks] == [((), "snapshot"), ((), "snapshot")]
    assert found.unequal == ("up.weight",)
    assert found.ranks[1].why == "no other rank holds what rank 1 held: up.weight"


def test_it_has_who_holds_which_part_and_what_the_mirrors_take() -> None:
    shards = {"a": (0, 1, 0, 1), "b": (0, 1, 0, 1), "c": (0, 0, 0, 3)}
    replicas = Replicas(compared_at=1, shards=shards, mirrored=frozenset((1, 3)))

    found = topology_of(job_of(replicas, 4), [], {1: 100, 3: 200})

    assert found.parts == (
        ShardedParameters(("a", "b"), ((0, 2), (1, 3))),
        ShardedParameters(("c",), ((0, 1, 2), (3,))),
    )
    assert [(rank.loss, rank.source) for rank in found.ranks] == [("peer", 2), ("buddy", 1), ("peer", 0), ("buddy", 3)]
    assert [rank.mirror_bytes for rank in found.ranks] == [0, 100, 0, 200]


def test_without_shards_all_ranks_are_peers() -> None:
    found = topology_of(job_of(Replicas(compared_at=1), 3), [])

    assert [found.peers(rank) for rank in range(3)] == [(1, 2), (0, 2), (0, 1)]


NOT_ALIKE = Replicas(compared_at=1, differing={"w": (0, 1, 0, 1)})
DECLARED = Replicas(compared_at=1, shards={"w": (0, 1, 0, 1)})
ALIKE = Replicas(compared_at=1)
THERE_AND_BACK = [[0, 1], [1, 0], [2, 3], [3, 2]]
PAIRS = [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("replicas", "exchanges", "messages", "expected"),
    [
        (NOT_ALIKE, True, [], {"ep": PAIRS}),
        (ALIKE, True, [], {"cp": PAIRS}),
        (NOT_ALIKE, False, THERE_AND_BACK, {"pp": PAIRS}),
        (ALIKE, False, THERE_AND_BACK, {"cp": PAIRS}),
        (ALIKE, False, [[0, 1], [2, 3]], {"stride1": PAIRS}),
        (DECLARED, True, THERE_AND_BACK, {"stride1": PAIRS}),
        (ALIKE, False, [], {"stride1": PAIRS}),
    ],
    ids=["experts", "context by all_to_all", "pipeline", "ring", "one way", "sharded by a mesh too", "neither"],
)
def test_a_dimension_without_a_name_has_that_of_its_use(
    replicas: Replicas, exchanges: bool, messages: list[list[int]], expected: dict[str, list[tuple[int, ...]]]
) -> None:
    groups = [Group("", [0, 1], exchanges, messages), Group("dim_0", [2, 3], exchanges, messages)]

    assert dimensions_of(groups, 4, replicas) == expected


def test_pipelines_whose_messages_are_in_the_group_of_all_ranks_are_distinguished() -> None:
    """Three stages, twice."""
    sent = [[0, 2], [2, 4], [4, 2], [2, 0], [1, 3], [3, 5], [5, 3], [3, 1]]
    replicas = Replicas(compared_at=1, differing={"w": (0, 0, 2, 2, 4, 4)})
    groups = [Group("", [*range(6)], False, sent), Group("", [0, 1]), Group("", [2, 3]), Group("", [4, 5])]

    found = dimensions_of(groups, 6, replicas)

    assert found == {"pp": [(0, 2, 4), (1, 3, 5)], "stride1": [(0, 1), (2, 3), (4, 5)]}


def test_the_mesh_s_own_name_stands() -> None:
    groups = [Group("stages", ranks, False, THERE_AND_BACK) for ranks in ([0, 1], [2, 3])]

    assert dimensions_of([*groups, Group("", [0, 1, 2, 3])], 4, NOT_ALIKE) == {"stages": PAIRS}


def test_groups_that_do_not_part_the_ranks_are_no_dimension() -> None:
    assert dimensions_of([Group("", [0, 1]), Group("", [1, 2])], 4, ALIKE) == {}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = topology_of(job_of(Replicas(compared_at=1, shards={"w": (0, 1, 0, 1)}), 4), [Group("tp", [0, 1])])

    replace_file(tmp_path / "topology.json", written.to_json())

    assert read_topology(tmp_path / "topology.json") == written


@pytest.mark.parametrize(
    ("groups", "owners", "expected"),
    [
        ([], (0, 0, 0, 0), [0, 3]),
        ([], (0, 1, 2, 3), [0, 3, 1, 2]),
        ([Group("tp", [0, 1]), Group("tp", [2, 3]), Group("dp", [0, 2]), Group("dp", [1, 3])], (0, 1, 0, 1), [0, 3]),
        ([Group("cp", [0, 1]), Group("cp", [2, 3])], (0, 0, 2, 2), [0, 3]),
    ],
    ids=["replicas", "one holder of each part", "tensor x data", "context x parts"],
)
def test_one_rank_of_each_coordinate_and_of_each_part(
    groups: list[Group], owners: tuple[int, ...], expected: list[int]
) -> None:
    found = topology_of(job_of(Replicas(compared_at=1, differing={"w": owners}), 4), groups)

    assert found.one_of_each_coordinate() == expected
