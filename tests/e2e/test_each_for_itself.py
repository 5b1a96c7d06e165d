"""Ranks without a process group, as in a sweep or an ensemble: a lost one is repaired alone, none other disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import (
    PLAIN,
    Launch,
    Run,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)
from ttprun.protocol.board import Board, unpack_slot
from ttprun.tensors.own_state import CELLS

SCRIPT = "each_for_itself.py"
MORE = ["--more", "10"]
TOGETHER = ("phase_changed", "shards_found", "snapshot_taken")  # events of a job whose ranks depend on each other


def assert_repaired_alone(run: Run, reference: Run, incidents: int = 1) -> None:
    """Nothing was lost, nothing differs, and nobody else noticed."""
    assert_only_replaced(run, incidents)
    assert_same_outcome(run, reference)
    assert_survivors_kept_their_pids(run)
    assert all(len(incident["ranks"]) == 1 for incident in run.incidents), run.story()
    assert run.status["generation"] == 0, run.story()
    seen = [event["event"] for event in run.events if event["event"] in TOGETHER and event.get("after") != "DONE"]
    assert seen == [], run.story()


@pytest.mark.parametrize(
    ("faults", "arguments"),
    [
        (["kill:rank=0,step=20,phase=after_step", "kill:rank=1,step=20,phase=forward"], []),
        (["kill:rank=1,step=9,phase=forward", "kill:rank=1,phase=replay"], []),
        (["kill:rank=1,step=20,phase=backward"], ["--group", "ends", *MORE]),
    ],
    ids=["both at once", "its replacement too", "group made at the end"],
)
def test_a_rank_without_a_process_group_is_repaired_alone(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, faults: Sequence[str], arguments: Sequence[str]
) -> None:
    run = run_ttprun(SCRIPT, 2, faults=faults, script_args=arguments)

    incidents = len(faults) if "replay" not in faults[-1] else 1
    assert_repaired_alone(run, undisturbed(SCRIPT, 2, arguments), incidents)


def memory_of(launch: Launch, name: str) -> list[Path]:
    """Files in memory of the run's agent."""
    fds = Path(f"/proc/{launch.process.pid}/fd")
    # Not readlink: others may be closed meanwhile.
    return [fd for fd in fds.iterdir() if os.path.realpath(fd).startswith(f"/memfd:ttprun-{name}")]


def kept_by(launch: Launch, rank: int) -> int:
    """The boundary whose state a rank keeps, as the board of the run says it."""
    with open(memory_of(launch, "board")[0], "r+b") as file:
        board = Board(file.fileno(), 2)
        return max(unpack_slot(board.get(rank, cell)).boundary for cell in CELLS)


def test_what_is_large_is_kept_now_and_then_and_the_steps_since_are_run_again(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The rank is killed after a step whose state it does not keep; how soon there is one depends on the machine."""
    arguments, gate, step = ["--hidden", "200000"], tmp_path / "gate", 10
    launch = start_ttprun(SCRIPT, 2, script_args=[*arguments, "--gate", str(gate)])
    launch.wait_for_line(1, f"step {step} ")
    while not 0 < (kept := kept_by(launch, 1)) < step:
        Path(f"{gate}{step}").touch()
        step += 1
        launch.wait_for_line(1, f"step {step} ")

    os.kill(launch.wait_for_rank(1)["pid"], signal.SIGKILL)
    for number in range(step, 41):
        Path(f"{gate}{number}").touch()
    run = launch.finish()

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("rewind", "recovered"), run.story()
    assert (incident["boundary"], incident["steps_lost"]) == (kept, step - kept), run.story()
    assert "it alone goes back to the newest such state" in run.output, run.story()
    assert run.hashes == undisturbed(SCRIPT, 2, arguments).hashes, run.story()
    assert [len(pids) for _, pids in sorted(run.pids.items())] == [1, 2], run.story()


def test_a_rank_without_others_loses_no_step_either(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    run = run_ttprun(PLAIN, 1, faults=["kill:rank=0,step=20,phase=backward"])

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(PLAIN, 1))


def test_a_rank_without_others_goes_back_to_its_snapshot_if_its_newest_state_is_damaged(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    gated = ["--gate", str(tmp_path / "gate")]
    launch = start_ttprun(SCRIPT, 1, options=["--snapshot-every", "4steps"], script_args=gated)
    launch.wait_for_line(0, "step 10 ")
    launch.wait_for_event("snapshot_taken", boundary=8)

    for file in memory_of(launch, "own-state"):
        os.truncate(file, 0)
    os.kill(launch.wait_for_rank(0)["pid"], signal.SIGKILL)
    for step in range(10, 41):
        (tmp_path / f"gate{step}").touch()
    run = launch.finish()

    (incident,) = run.incidents
    assert (incident["rung"], incident["boundary"], incident["steps_lost"]) == ("rewind", 8, 2), run.story()
    assert (incident["outcome"], run.hashes) == ("recovered", undisturbed(SCRIPT, 1).hashes), run.story()
