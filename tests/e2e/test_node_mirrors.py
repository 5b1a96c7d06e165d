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
    nodes: Nodes, number: int, folder: Path, script: str, ranks: int = 1, options: Sequence[str] = ()
) -> Launch:
    """A launcher whose ranks wait in the middle of step 12 until the gate is open; the last node is a spare."""
    size = len(nodes.names) - 1
    return start_ttprun(
        script,
        ranks,
        folder / str(number),
        options=[*nodes.rendezvous(number, f"{size}:{size + 1}"), "--node-wait-s", "60", "--buddy", "node", *options],
        script_args=["--gate", str(folder / "gate")],
        out=folder / "out",
        within=nodes.inside(number),
    )


@pytest.mark.parametrize(
    ("script", "ranks", "is_leader"), [(FSDP, 1, False), (FSDP, 2, True), (TOGETHER, 1, False), (TOGETHER, 2, True)]
)
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
