"""An elastic job whose parameters are sharded over its ranks: they are dealt out again when a node comes or leaves."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.e2e.harness import Launch, Run, assert_no_orphans, start_ttprun
from tests.e2e.test_elastic import has_begun_resizes, wait_until
from tests.e2e.test_nodes import leading
from tests.nodes import Nodes, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
SCRIPT, STEPS = "tensor_parallel_mesh.py", 12
COMES_AT, LEAVES_AT = 4, 8
LAYOUTS = [  # ranks of a node, and arguments of the script
    pytest.param(1, ["--tp", "1", "--fsdp"], id="FSDP2"),
    pytest.param(2, ["--tp", "2"], id="tensor parallel within a node"),
    pytest.param(2, ["--tp", "2", "--fsdp"], id="FSDP2 over tensor parallel"),
]
LOSS = re.compile(r"\[rank 0] step (\d+) loss ([\d.]+)")


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS[1:])
def test_parameters_that_are_sharded_are_dealt_out_again_when_a_node_comes_and_when_it_leaves(
    tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    last = 3 * ranks - 1
    with Nodes(3) as nodes:
        launches = with_a_third_node(nodes, tmp_path, ranks, layout)
        os.kill(launches[2].wait_for_rank(last)["pid"], signal.SIGKILL)
        launches[leading(launches)].wait_for_event("incident", rung="replace", phase="RUNNING")
        launches[2].process.send_signal(signal.SIGUSR1)
        wait_for_resizes(tmp_path, 2)
        (tmp_path / f"gate{LEAVES_AT}").touch()
        runs = [launch.finish() for launch in launches]

    leader = next(run for run in runs if run.status["is_leading"])
    assert [run.exit_code for run in runs] == [0, 0, 143], leader.story()
    came, replaced, left = [(one["rung"], one["outcome"], one["ranks"]) for one in leader.incidents]
    assert [came, left] == [("resize", "recovered", [])] * 2, leader.story()
    assert replaced == ("replace", "recovered", [last]), leader.story()
    assert_as_one_process(leader, runs)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS[:1])
def test_a_lost_node_whose_shards_the_next_node_keeps_is_left_out_and_no_step_is_lost(
    tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    with Nodes(3) as nodes:
        launches = with_a_third_node(nodes, tmp_path, ranks, layout, "--buddy", "node")
        nodes.end_processes(2)
        lost = launches.pop()
        wait_until(lambda: any(is_healthy_with(2 * ranks, launch) for launch in launches))
        (tmp_path / f"gate{LEAVES_AT}").touch()
        runs = [launch.finish() for launch in launches]
        lost.finish()

    leader = next(run for run in runs if run.status["is_leading"])
    assert [run.exit_code for run in runs] == [0, 0], leader.story()
    assert_as_one_process(leader, runs)


def assert_as_one_process(leader: Run, runs: Sequence[Run]) -> None:
    """No step was lost, nothing is left, and the losses are those of one process with the batches of all places."""
    assert {one["steps_lost"] for one in leader.incidents} == {0}, leader.story()
    assert [one["boundary"] for one in leader.incidents if one["rung"] == "resize"] == [COMES_AT, LEAVES_AT]
    for run in runs:
        assert_no_orphans(run)
    expected = losses_of_one_process(lambda step: 3 if COMES_AT <= step < LEAVES_AT else 2)
    assert losses_of(leader) == pytest.approx(expected, abs=1e-5), leader.story()
    assert len({lines[-1].split()[-1] for run in runs for lines in run.hashes.values() if lines}) == 1, leader.story()


def with_a_third_node(nodes: Nodes, folder: Path, ranks: int, layout: list[str], *options: str) -> list[Launch]:
    """The launchers of a job that a third node has joined; its ranks wait for the gate at LEAVES_AT.

    ranks    of each node
    layout   arguments of the script
    """
    launches = [start(nodes, number, folder, ranks, layout, options) for number in range(2)]
    launches[0].wait_for_line(0, f"step {COMES_AT} ")
    launches.append(start(nodes, 2, folder, ranks, layout, options))
    wait_for_resizes(folder, 1)
    (folder / f"gate{COMES_AT}").touch()
    launches[2].wait_for_line(0, f"step {LEAVES_AT} ")
    return launches


def start(nodes: Nodes, number: int, folder: Path, ranks: int, layout: list[str], options: Sequence[str]) -> Launch:
    """A launcher of a job of two or three nodes, whose ranks wait before both changes."""
    gates = ["--gate", str(folder / "gate"), "--gates", f"{COMES_AT},{LEAVES_AT}"]
    return start_ttprun(
        SCRIPT,
        ranks,
        folder / str(number),
        options=[*nodes.rendezvous(number, "2:3"), "--elastic", "--save-dir", str(folder / "save"), *options],
        script_args=[*layout, "--reseed", "--steps", str(STEPS), *gates],
        out=folder / "out",
        within=nodes.inside(number),
    )


def wait_for_resizes(folder: Path, count: int) -> None:
    """Block until so many resizes have begun that the launcher that leads has asked for."""
    wait_until(lambda: any(has_begun_resizes(folder / f"{number}", count) for number in range(2)))


def is_healthy_with(world_size: int, launch: Launch) -> bool:
    """Whether a launcher's status has so many ranks, and all of them train."""
    assert launch.run_dir is not None
    status = json.loads((launch.run_dir / "status.json").read_text())
    return bool(status["world_size"] == world_size and status["state"] == "healthy")


def losses_of(run: Run) -> list[float]:
    """What rank 0 has printed, of each step; what it has printed again counts."""
    found = [LOSS.fullmatch(line) for line in run.stdout[0]]
    losses = {int(one[1]): float(one[2]) for one in found if one}
    return [losses[step] for step in range(1, STEPS + 1)]


def losses_of_one_process(places: Callable[[int], int]) -> list[float]:
    """The same of one process that takes the mean over the batches of all data parallel places.

    places   of a step
    """
    torch.manual_seed(1)
    embedding, norm, up = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 64)
    down, head = nn.Linear(64, 16), nn.Linear(16, 50)
    optimizer = torch.optim.AdamW(nn.ModuleList([embedding, norm, up, down, head]).parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(places(step)):
            tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(100 * step + place))
            x = embedding(tokens[:, :-1])
            scores = head(x + down(torch.relu(up(norm(x)))))
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / places(step)).backward()
            if place == 0:
                losses.append(loss.item())
        optimizer.step()
    return losses
