"""A node whose ranks alone hold their shards is lost: the next node keeps their mirrors, too (`--buddy node`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Launch, Undisturbed, start_ttprun
from tests.e2e.test_nodes import assert_same_weights, finished, leading
from tests.nodes import Nodes, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
FSDP, TOGETHER = "fsdp_model.py", "steps_together.py"


def start_gated(
    nodes: Nodes,
    number: int,
    folder: Path,
    script: str,
    ranks: int = 1,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    size: int = 2,
) -> Launch:
    """A launcher whose ranks wait in the middle of step 12 until the gate is open; those beyond `size` are spares."""
    where = nodes.rendezvous(number, f"{size}:{len(nodes.names)}")
    return start_ttprun(
        script,
        ranks,
        folder / str(number),
        options=[*where, "--node-wait-s", "60", "--buddy", "node", *options],
        faults=faults,
        script_args=["--gate", str(folder / "gate")],
        out=folder / "out",
        within=nodes.inside(number),
    )


@pytest.mark.parametrize(("script", "ranks", "is_leader"), [(TOGETHER, 2, True)])
def test_a_spare_takes_the_place_of_a_lost_node_whose_ranks_alone_hold_their_shards(
    undisturbed: Undisturbed, tmp_path: Path, script: str, ranks: int, is_leader: bool
) -> None:
    with Nodes(3) as nodes:
        launches = [start_gated(nodes, number, tmp_path, script, ranks) for number in range(2)]
        for launch in launches:
            launch.wait_for_line(0, "step 11 " if script == FSDP else "step 10 ")
        spare = start_gated(nodes, 2, tmp_path, script, ranks)
        lead = leading(launches)
        launches[lead].wait_for_event("node_waits")
        lost = lead if is_leader else 1 - lead

        nodes.end_processes(lost)
        (tmp_path / "gate").touch()
        leader, runs = finished([launches[1 - lost], spare])

    assert [(one["kind"], one["rung"]) for one in leader.incidents] == [("node-lost", "replace")], leader.story()
    assert leader.incidents[0]["steps_lost"] == 0, leader.story()
    assert_same_weights(runs, undisturbed(script, 2 * ranks))
    assert [event["why_not"] for event in runs[1].events if event["event"] == "mirror_fetched"] == [""] * ranks


def test_two_nodes_are_lost_one_after_the_other_inside_a_step_and_in_a_backward_pass(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    faults = ["sleep:rank=1,step=12,phase=in_step", "sleep:rank=0,step=20,phase=backward"]
    (tmp_path / "gate").touch()
    with Nodes(4) as nodes:
        launches = [start_gated(nodes, number, tmp_path, FSDP, faults=faults) for number in range(2)]
        for launch in launches:
            launch.wait_for_line(0, "step 1 ")  # before the nodes have met each takes itself for the one that leads
        lead = leading(launches)
        spares = [start_gated(nodes, number, tmp_path, FSDP) for number in (2, 3)]

        launches[lead].wait_for_event("fault_injected", rank=1)
        nodes.end_processes(1 - lead)
        launches[lead].wait_for_event("fault_injected", rank=0)
        nodes.end_processes(lead)
        leader, runs = finished(spares)

    incidents = [one for run in (launches[lead].finish(), leader) for one in run.incidents]
    assert [(one["kind"], one["rung"], one["ranks"]) for one in incidents if one["outcome"] == "recovered"] == [
        ("node-lost", "replace", [1]),
        ("node-lost", "replace", [0]),
    ]
    assert {one["steps_lost"] for one in incidents} == {0}, leader.story()
    assert_same_weights(runs, undisturbed(FSDP, 2))


def test_a_lost_node_that_nobody_replaces_leaves_a_checkpoint_that_has_its_parts(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    options = ["--save-dir", str(tmp_path / "save"), "--node-wait-s", "1"]
    with Nodes(2) as nodes:
        launches = [start_gated(nodes, number, tmp_path, FSDP, options=options) for number in range(2)]
        for launch in launches:
            launch.wait_for_line(0, "step 11 ")
        lead = leading(launches)
        launches[lead].wait_for_event("mirror_copied")

        nodes.end_processes(1 - lead)
        (tmp_path / "gate").touch()
        run = launches[lead].finish()

        again = tmp_path / "again"
        again.mkdir()
        (again / "gate").touch()
        launches = [start_gated(nodes, number, again, FSDP, options=options) for number in range(2)]
        leader, runs = finished(launches)

    saved = run.status["checkpoint"]
    assert (saved["cause"], saved["reason"], saved["boundary"]) == ("dying gasp", "", 11), run.story()
    assert run.exit_code == 143, run.story()
    assert "resumed from step 11" in leader.output, leader.story()
    assert_same_weights(runs, undisturbed(FSDP, 2))


@pytest.mark.parametrize(("kind", "phase"), [("hccl", "backward"), ("nccl", "in_step")])
def test_a_node_with_devices_is_lost_and_the_next_one_has_the_mirrors_of_its_ranks(
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, phase: str
) -> None:
    arguments = ["--layout=fsdp2", "--blocks=3", "--steps=16"]
    fault = f"sleep:rank=1,step=8,phase={phase}"
    reference = undisturbed("device_layouts.py", 2, arguments, device="npu")
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    with Nodes(3) as nodes:

        def start(number: int) -> Launch:
            return start_ttprun(
                "device_layouts.py",
                1,
                tmp_path / str(number),
                options=[*nodes.rendezvous(number, "2:3"), "--node-wait-s", "60", "--buddy", "node"],
                faults=[fault],
                script_args=arguments,
                out=tmp_path / "out",
                device="npu",
                within=nodes.inside(number),
            )

        launches = [start(number) for number in range(2)]
        for launch in launches:
            launch.wait_for_line(0, "step 1 ")
        lead = leading(launches)
        spare = start(2)
        launches[lead].wait_for_event("fault_injected", rank=1)
        nodes.end_processes(1 - lead)
        leader, runs = finished([launches[lead], spare])

    assert [(one["kind"], one["rung"], one["steps_lost"]) for one in leader.incidents] == [("node-lost", "replace", 0)]
    assert_same_weights(runs, reference)
