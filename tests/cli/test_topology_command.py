"""`ttprun topology` on run directories written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttprun.cli.main import main
from ttprun.observe.run_directory import RunDirectory, replace_file
from ttprun.observe.status import RankTopology, ShardedParameters, Topology

MESH = Topology(
    boundary=2,
    groups={"dp0": (0, 2), "dp1": (1, 3), "tp0": (0, 1), "tp1": (2, 3)},
    replicas=((0, 2), (1,), (3,)),
    unequal=("up.weight",),
    ranks=(
        RankTopology(0, {"dp": 0, "tp": 0}, 0, "peer"),
        RankTopology(1, {"dp": 0, "tp": 1}, 1, "snapshot"),
        RankTopology(2, {"dp": 1, "tp": 0}, 0, "peer"),
        RankTopology(3, {"dp": 1, "tp": 1}, 2, "snapshot"),
    ),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory.create("r1")


def test_it_shows_groups_coordinates_peers_and_what_a_loss_costs(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_file(run.topology, MESH.to_json())

    assert main(["topology"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["dp0 = {0, 2}", "dp1 = {1, 3}"]
    assert [" ".join(line.split()) for line in lines[5:7]] == [
        "0 0 0 2 replaced, no step lost",
        "1 0 1 - all ranks go back to the newest snapshot",
    ]
    assert lines[9] == "not the same in all ranks (compared at step 2): up.weight"
    assert "A shard with one holder is gone with its rank" in lines[10]


def test_it_shows_what_mirrors_take_and_who_holds_which_part(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = tuple(RankTopology(rank, {}, rank, "buddy", mirror_bytes=3 << 20) for rank in range(2))
    found = Topology(
        2,
        {},
        ((0,), (1,)),
        ("up.weight", "down.weight"),
        ranks,
        (ShardedParameters(("up.weight", "down.weight"), ((0,), (1,))),),
    )
    replace_file(run.topology, found.to_json())

    assert main(["topology"]) == 0

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == [f"{rank} - 3.0 MiB replaced from its mirror, no step lost" for rank in range(2)]
    assert lines[-1] == "parts held by ranks 0 | 1: up.weight, down.weight"


def test_json_is_the_topology_on_one_line(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    replace_file(run.topology, MESH.to_json())

    assert main(["topology", str(run.path), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["replicas"] == [[0, 2], [1], [3]]


def test_it_says_what_would_be_done_if_one_rank_were_lost_and_why(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = RankTopology(0, {}, 0, "peer", source=2), RankTopology(1, {}, 1, "snapshot", why="nobody else holds w")
    replace_file(run.topology, Topology(2, {}, ((0, 2), (1,)), ("w",), ranks).to_json())

    assert [main(["topology", "--if-lost", str(rank)]) for rank in (0, 1, 3)] == [0, 0, 2]

    out, err = capsys.readouterr()
    snapshot = "rank 1: all ranks go back to the newest snapshot (nobody else holds w)"
    assert out.splitlines() == ["rank 0: replaced, no step lost, from rank 2", snapshot]
    assert "the run has no rank 3" in err


def test_before_the_ranks_were_compared_it_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology"]) == 2

    assert "have not been compared" in capsys.readouterr().err


def test_a_file_that_is_something_else_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.topology.write_text("[]")

    assert main(["topology"]) == 2

    assert "the topology cannot be read" in capsys.readouterr().err
