"""Several nodes: network namespaces of this machine (`tests/nodes.py`), a launcher in each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    PLAIN,
    RUN_LIMIT_S,
    Launch,
    Run,
    Undisturbed,
    assert_no_orphans,
    environment,
    start_ttprun,
)
from tests.nodes import Nodes, why_none
from ttprun.agent.node.step_again import take_again

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
GATED = "gated_steps.py"  # 40 steps
StartNodes = Callable[..., list[Launch]]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes."""
    with Nodes(2) as found:
        yield found


@pytest.fixture
def start(nodes: Nodes, tmp_path: Path) -> StartNodes:
    """`start(script, ranks, options=(), **how)`: the launchers of both nodes, each with so many ranks."""

    def start_all(script: str, ranks: int, options: Any = (), name: str = "", **how: Any) -> list[Launch]:
        return [
            start_ttprun(
                script,
                ranks,
                tmp_path / f"{name}{number}",
                options=[*nodes.rendezvous(number), *options],
                within=nodes.inside(number),
                **how,
            )
            for number in range(len(nodes.names))
        ]

    return start_all


def finished(launches: list[Launch], limit_s: float = RUN_LIMIT_S) -> tuple[Run, list[Run]]:
    """The runs of all nodes at their end, the one whose agent leads first: it has rank 0."""
    runs = [launch.finish(limit_s) for launch in launches]
    for run in runs:
        assert_no_orphans(run)
    leader = next(run for run in runs if run.status["is_leading"])
    return leader, runs


def assert_same_weights(runs: list[Run], reference: Run) -> None:
    """All ranks, on whatever nodes, ended with the weights and optimizer states of the undisturbed run."""
    for run in runs:
        assert run.exit_code == 0, run.story()
    hashes = chain(*(run.hashes.values() for run in runs))
    assert sorted(chain(*hashes)) == sorted(chain(*reference.hashes.values())), runs[0].story()
    assert reference.final in [run.final for run in runs]


CASES = [(PLAIN, 1, 1)]


@pytest.mark.parametrize(("script", "ranks", "lost"), CASES)
def test_a_rank_that_is_killed_on_either_node_is_replaced_there_and_no_step_is_lost(
    start: StartNodes, undisturbed: Undisturbed, script: str, ranks: int, lost: int
) -> None:
    fault = f"kill:rank={lost},step=20"

    leader, runs = finished(start(script, ranks, faults=[fault]))

    assert_same_weights(runs, undisturbed(script, 2 * ranks))
    assert [incident["rung"] for incident in leader.incidents] == ["replace"], leader.story()
    assert leader.incidents[0]["ranks"] == [lost], leader.story()
    assert leader.incidents[0]["steps_lost"] == 0, leader.story()
    assert f"incident {leader.incidents[0]['id']}" in leader.output


@pytest.mark.parametrize(("finding", "ranks", "more"), [("equal", 2, ["--sharded", "yes"]), ("suspect", 1, [])])
def test_a_bit_that_is_flipped_on_the_second_node_is_found_before_it_is_used_and_else_nothing_is_said(
    start: StartNodes, undisturbed: Undisturbed, tmp_path: Path, finding: str, ranks: int, more: list[str]
) -> None:
    options = ["--verify-steps", "1/6,before", "--save-dir", str(tmp_path / "save"), "--keep-steps", "1"]
    faults = [f"flip-gradient:rank=1,step={at},phase=backward,seed=5" for at in (18, 30) if finding == "suspect"]
    launches = start(GATED, ranks, options, faults=faults, script_args=["--gate", str(tmp_path / "gate"), *more])
    for launch in launches:
        launch.wait_for_standby("ready")
    (tmp_path / "gate").touch()

    leader, runs = finished(launches)
    assert_same_weights(runs, undisturbed(GATED, 2 * ranks, more))
    verified = {event["step"]: event["finding"] for event in leader.events if event["event"] == "step_verified"}
    assert verified | {6: "equal"} == {at: finding if at in (18, 30) else "equal" for at in range(6, 37, 6)}
    named = "rank 1 is suspect: it has computed the gradient of net.0.weight"
    assert [(named in one["reason"], one["steps_lost"]) for one in leader.incidents] == [(True, 0)] * len(faults)
    assert ("was suspect before: take it out of the job (ttprun drain 1)" in leader.output) == bool(faults)
    again = take_again(next((runs[1].folder / "run" / "steps").iterdir()))
    assert (again.equal[-1], again.differing) == ("weights and optimizer state after the step", ()), again


MIRRORED = [
    ("fsdp_model.py", 2, [], ["kill:rank=2,step=5,phase=collective", "kill:rank=3,step=7,phase=in_step"]),
    (
        "steps_together.py",
        1,
        ["--optimizer", "adamw"],
        ["kill:rank=1,step=12,phase=in_step", "kill:rank=0,step=17,phase=backward"],
    ),
]


@pytest.mark.parametrize(("script", "ranks", "arguments", "faults"), MIRRORED)
def test_a_rank_that_alone_holds_its_shards_is_replaced_from_its_mirror_on_its_node(
    start: StartNodes, undisturbed: Undisturbed, script: str, ranks: int, arguments: list[str], faults: list[str]
) -> None:
    leader, runs = finished(start(script, ranks, faults=faults, script_args=arguments))

    assert_same_weights(runs, undisturbed(script, 2 * ranks, arguments))
    assert [incident["rung"] for incident in leader.incidents] == ["replace"] * 2, leader.story()
    assert {incident["steps_lost"] for incident in leader.incidents} == {0}, leader.story()
    assert "each hold what no other rank holds: mirrored in" in leader.output, leader.story()


@pytest.mark.parametrize(
    ("number", "is_to_leader", "exit_code", "script_args"),
    [
        (signal.SIGTERM, False, 143, ["--handles-term"]),
    ],
)
def test_a_signal_to_the_launcher_of_one_node_ends_all_with_its_exit_code(
    start: StartNodes, number: signal.Signals, is_to_leader: bool, exit_code: int, script_args: list[str]
) -> None:
    launches = start("interrupted.py", 1, script_args=script_args)
    for launch in launches:
        launch.wait_for_file("out/trains-*")
    leader = next(n for n, launch in enumerate(launches) if (launch.folder / "out/trains-0").exists())
    target = leader if is_to_leader else 1 - leader

    launches[target].process.send_signal(number)
    runs = [launch.finish() for launch in launches]

    for run in runs:
        assert run.exit_code == exit_code, run.story()
        assert run.status["reason"].startswith(f"ended by {number.name} on node {int(not is_to_leader)} "), run.story()
        assert_no_orphans(run)
    if number == signal.SIGTERM and script_args:
        assert [run.stdout for run in runs] == [{0: ["stopped by itself"]}] * 2, runs[0].story()


@pytest.mark.parametrize(
    ("script", "ranks", "faults", "cause", "is_elsewhere"),
    [
        (PLAIN, 1, ["preempt:rank=0,step=12,phase=before_step"], "ended", True),
    ],
)
def test_what_a_job_on_several_nodes_has_saved_is_resumed_and_nothing_differs(
    start: StartNodes,
    tmp_path: Path,
    undisturbed: Undisturbed,
    script: str,
    ranks: int,
    faults: Any,
    cause: str,
    is_elsewhere: bool,
) -> None:
    options, out = ["--save-dir", str(tmp_path / "save")], tmp_path / "out"
    cannot_replace = ["--rungs", "persist"] if cause == "dying gasp" else []

    leader, runs = finished(start(script, ranks, faults=faults, options=[*options, *cannot_replace], out=out))
    if is_elsewhere:
        again = [start_ttprun(script, 2 * ranks, tmp_path / "again", options=options, out=out).finish()]
    else:
        _, again = finished(start(script, ranks, options=options, name="again", out=out))

    assert [run.exit_code for run in runs] == [143 if cause == "ended" else 137] * 2, leader.story()
    assert leader.status["checkpoint"]["cause"] == cause, leader.story()
    assert leader.status["checkpoint"]["reason"] == "", leader.story()
    assert {run.status["resume"]["outcome"] for run in again} == {"recovered"}, again[0].story()
    assert not any("other arguments" in run.output for run in again)
    assert_same_weights(again, undisturbed(script, 2 * ranks))


@pytest.mark.parametrize("is_cut", [False, True], ids=["its processes are killed", "its link is cut"])
def test_a_spare_node_takes_the_place_of_a_lost_one_and_no_step_is_lost(
    undisturbed: Undisturbed, tmp_path: Path, is_cut: bool
) -> None:
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path)
        spare = start_gated(nodes, 2, tmp_path)
        launches[0].wait_for_event("node_waits")

        nodes.cut(1) if is_cut else nodes.end_processes(1)
        (tmp_path / "gate").touch()
        leader, runs = finished([launches[0], spare])
        lost = launches[1].finish()

    assert_replaced(leader, [1])
    assert_same_weights(runs, undisturbed(GATED, 2))
    assert lost.exit_code == (143 if is_cut else -signal.SIGKILL), lost.story()
    assert ("reaches 1 of 3 agents: the others may go on without it" in lost.output) == is_cut, lost.story()


def test_a_node_is_drained_and_a_spare_one_takes_its_place(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path)
        spare = start_gated(nodes, 2, tmp_path)
        launches[0].wait_for_event("node_waits")
        words = [sys.executable, "-m", "ttprun", "drain", "1", "--run", str(launches[0].run_dir), "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment()) as drain:
            launches[0].wait_for_event("phase_changed")
            (tmp_path / "gate").touch()
            said, _ = drain.communicate()
        leader, runs = finished([launches[0], spare])
        drained = launches[1].finish()

    assert (drain.returncode, json.loads(said)["rung"]) == (0, "replace")
    assert "was drained as requested (ttprun drain)" in leader.incidents[0]["reason"]
    assert_replaced(leader, [1], "planned")
    assert_same_weights(runs, undisturbed(GATED, 2))
    assert drained.exit_code == 143, drained.story()
    assert "goes on without this node: node 1" in drained.output


def test_a_node_that_has_notice_of_its_end_is_drained_if_a_spare_one_waits(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    notice = ["--move-on", "notice"]
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path, options=notice)
        spare = start_gated(nodes, 2, tmp_path, options=notice)
        launches[0].wait_for_event("node_waits")
        launches[1].process.send_signal(signal.SIGUSR1)
        launches[0].wait_for_event("phase_changed")
        (tmp_path / "gate").touch()
        leader, runs = finished([launches[0], spare])
        drained = launches[1].finish()

    assert_replaced(leader, [1], "planned")
    assert_same_weights(runs, undisturbed(GATED, 2))
    assert drained.exit_code == 143, drained.story()


def test_without_a_spare_a_node_that_has_notice_of_its_end_ends_the_job_with_its_state(tmp_path: Path) -> None:
    with Nodes(2) as nodes:
        options = ["--move-on", "notice", "--save-dir", str(tmp_path / "save")]
        launches = at_gate(nodes, range(2), tmp_path, size="2", options=options)
        launches[1].process.send_signal(signal.SIGUSR1)
        launches[0].wait_for_event("not_drained")
        (tmp_path / "gate").touch()
        _, runs = finished(launches)

    assert [run.exit_code for run in runs] == [143, 143], runs[0].story()
    assert "its state was saved" in runs[0].output


def test_a_rank_that_is_being_moved_trains_on_if_the_agent_that_leads_is_lost(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    sleeps = ["--allow-faults", "--fault", "sleep:rank=1,step=0,phase=replay"]
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path, options=sleeps)
        spare = start_gated(nodes, 2, tmp_path, options=sleeps)
        launches[0].wait_for_event("node_waits")
        words = [sys.executable, "-m", "ttprun", "move", "1", "--run", str(launches[0].run_dir)]
        with subprocess.Popen(words, env=environment()) as move:
            launches[0].wait_for_event("phase_changed")
            (tmp_path / "gate").touch()
            launches[1].wait_for_event("rank_parked")
            launches[1].wait_for_event("rank_started", rank=1, is_replacement=True)
            nodes.end_processes(0)
            move.kill()
        leader, runs = finished([launches[1], spare])

    assert_replaced(leader, [0])
    assert_same_weights(runs, undisturbed(GATED, 2))
    assert len(launches[1].pids[1]) == 2, leader.story()


@pytest.mark.parametrize(("host", "by"), [(0, "the save directory"), (1, "the discovery command")])
def test_who_comes_after_the_node_with_the_store_was_lost_finds_the_job(
    undisturbed: Undisturbed, tmp_path: Path, host: int, by: str
) -> None:
    save = ["--save-dir", str(tmp_path / "save")]
    with Nodes(3) as nodes:
        named = " ".join(nodes.addresses)
        is_file = by == "the save directory"
        options = (
            [*save, "--run-id", "job"] if is_file else [*save, "--elastic", "--discovery", f"printf '%s\\n' {named}"]
        )
        size = "2" if is_file else "2:2"
        launches = at_gate(nodes, range(2), tmp_path, size=size, host=host, options=options)

        nodes.end_processes(host)
        came = start_gated(nodes, 2, tmp_path, size=size, host=host, options=options)
        launches[1 - host].wait_for_event("node_replaced")
        (tmp_path / "gate").touch()
        leader, runs = finished([launches[1 - host], came])

    assert [(one["kind"], one["rung"], one["steps_lost"]) for one in leader.incidents] == [("node-lost", "replace", 0)]
    assert_same_weights(runs, undisturbed(GATED, 2))


def leading(launches: list[Launch]) -> int:
    """The number of the launcher whose agent leads."""
    found = (json.loads((launch.run_dir / "status.json").read_text()) for launch in launches if launch.run_dir)
    return next(number for number, status in enumerate(found) if status["is_leading"])


def start_gated(
    nodes: Nodes,
    number: int,
    folder: Path,
    ranks: int = 1,
    size: str = "2:3",
    gate: Path | None = None,
    host: int = 0,
    options: Sequence[str] = (),
) -> Launch:
    """A launcher whose ranks wait before step 12 until the gate is open.

    gate      the folder of the gate and of what is written, if it is another one
    options   further ones
    """
    shared = gate or folder
    return start_ttprun(
        GATED,
        ranks,
        folder / str(number),
        options=[*nodes.rendezvous(number, size, host), "--node-wait-s", "60", *options],
        script_args=["--gate", str(shared / "gate")],
        out=shared / "out",
        within=nodes.inside(number),
    )


def at_gate(nodes: Nodes, numbers: Iterable[int], folder: Path, **how: Any) -> list[Launch]:
    """Launchers as above, whose ranks have come to the gate."""
    launches = [start_gated(nodes, number, folder, **how) for number in numbers]
    for launch in launches:
        launch.wait_for_line(0, "step 11 ")
    return launches


def assert_replaced(leader: Run, ranks: list[int], kind: str = "node-lost") -> None:
    """A node was lost or drained, and its ranks were replaced without the loss of a step."""
    incidents = [(one["kind"], one["rung"], one["ranks"], one["steps_lost"]) for one in leader.incidents]
    assert incidents == [(kind, "replace", ranks, 0)], leader.story()


@pytest.mark.parametrize("is_cut", [False, True], ids=["its processes are killed", "its link is cut"])
def test_the_node_whose_agent_leads_is_lost_and_the_next_one_takes_over_with_a_spare(
    undisturbed: Undisturbed, tmp_path: Path, is_cut: bool
) -> None:
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path)
        spare = start_gated(nodes, 2, tmp_path)
        lead = leading(launches)
        launches[lead].wait_for_event("node_waits")

        nodes.cut(lead) if is_cut else nodes.end_processes(lead)
        (tmp_path / "gate").touch()
        leader, runs = finished([launches[1 - lead], spare])

    assert_replaced(leader, [0])
    assert_same_weights(runs, undisturbed(GATED, 2))
