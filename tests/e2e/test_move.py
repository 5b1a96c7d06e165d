"""`ttprun move`: healthy ranks give their places to new processes. `ttprun drain` is in test_nodes.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import (
    PLAIN,
    Launch,
    StartTtprun,
    Undisturbed,
    assert_no_orphans,
    assert_only_replaced,
    assert_recovered_by,
    assert_same_outcome,
    environment,
    ttprun,
)

SHARDED = "fsdp_model.py"


def move(launch: Launch, *words: object) -> subprocess.CompletedProcess[str]:
    """Ask again as long as the ranks have not been compared."""
    while True:
        asked = ttprun("move", *map(str, words), "--run", str(launch.run_dir), "--json")
        if "compared yet" not in asked.stderr and "not yet" not in asked.stderr:
            return asked


@pytest.mark.parametrize(
    ("script", "arguments"), [(PLAIN, ["--steps", "400"]), (SHARDED, ["--epochs", "20"])], ids=["replicas", "shards"]
)
def test_a_healthy_rank_is_moved_to_a_new_process_and_nothing_differs(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, script: str, arguments: list[str]
) -> None:
    launch = start_ttprun(script, 2, script_args=arguments)
    launch.wait_for_line(0, "step 2 ")

    asked = move(launch, 1)
    result = launch.finish()

    incident = json.loads(asked.stdout)
    assert (asked.returncode, incident["kind"], incident["rung"]) == (0, "planned", "replace"), asked.stderr
    assert_only_replaced(result)
    assert [len(result.pids[rank]) for rank in (0, 1)] == [1, 2]
    assert_same_outcome(result, undisturbed(script, 2, arguments))


def test_a_rank_whose_replacement_is_lost_trains_on_in_its_old_process(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    launch = start_ttprun(PLAIN, 2, script_args=["--steps", "400"], faults=["kill:rank=1,step=0,phase=replay"])
    launch.wait_for_line(0, "step 2 ")

    asked = move(launch, 1)
    again = move(launch, 1)
    result = launch.finish()

    assert asked.returncode == 1, asked.stderr
    assert json.loads(asked.stdout)["reason"].endswith("; the old process trains on"), asked.stdout
    assert (again.returncode, json.loads(again.stdout)["rung"]) == (0, "replace"), again.stdout
    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [
        ("reconnect", "recovered"),
        ("replace", "recovered"),
    ], result.story()
    assert [len(result.pids[rank]) for rank in (0, 1)] == [1, 3]
    assert_same_outcome(result, undisturbed(PLAIN, 2, ["--steps", "400"]))


def held_move(launch: Launch) -> subprocess.Popen[str]:
    """Ask for a move of rank 1 whose replacement never comes, and wait until the old process is stopped."""
    launch.wait_for_line(0, "step 2 ")
    words = [sys.executable, "-m", "ttprun", "move", "1", "--run", str(launch.run_dir), "--json"]
    asked = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    launch.wait_for_event("rank_parked")
    launch.wait_for_event("rank_started", rank=1, is_replacement=True)
    return asked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_that_ends_in_a_move_leaves_no_stopped_process_behind(
    start_ttprun: StartTtprun, number: signal.Signals
) -> None:
    launch = start_ttprun("epochs_dataloader.py", 2, faults=["sleep:rank=1,step=0,phase=replay"])

    with held_move(launch):
        launch.process.send_signal(number)
        result = launch.finish()

    assert result.exit_code == -number if number == signal.SIGKILL else 130, result.story()
    assert_no_orphans(result)


def test_another_rank_that_is_lost_in_a_move_is_replaced_and_the_old_process_trains_on(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    launch = start_ttprun(PLAIN, 2, script_args=["--steps", "400"], faults=["sleep:rank=1,step=0,phase=replay"])

    with held_move(launch) as asked:
        os.kill(launch.wait_for_rank(0)["pid"], signal.SIGKILL)
        asked.communicate()
        result = launch.finish()

    assert asked.returncode == 1
    assert_recovered_by(result, ["replace"])
    started = [event["rank"] for event in result.events if event["event"] == "rank_started"]
    assert [started.count(rank) for rank in (0, 1)] == [2, 2], result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2, ["--steps", "400"]))


def test_a_rank_with_a_fixed_port_is_moved_once_its_old_process_has_ended(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launch = start_ttprun("holds_a_port.py", 2, script_args=["--steps", "400", str(port)])
    launch.wait_for_line(0, "step 2 ")

    kept, ended_first = move(launch, 1), move(launch, 1, "--end-first")
    result = launch.finish()

    assert kept.returncode == 1, kept.stderr
    assert "Address already in use" in kept.stdout
    assert "; the old process trains on" in kept.stdout
    assert ended_first.returncode == 0, ended_first.stderr + result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2, ["--steps", "400"]))


def test_a_rank_that_is_moved_as_the_script_ends_ends_with_the_others(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    launch = start_ttprun(PLAIN, 2, script_args=["--steps", "400"])
    launch.wait_for_line(0, "step 398 ")

    move(launch, 1)
    result = launch.finish()

    assert result.exit_code == 0, result.story()
    assert result.hashes == undisturbed(PLAIN, 2, ["--steps", "400"]).hashes


def test_all_ranks_at_once_cannot_be_moved_and_train_on(start_ttprun: StartTtprun, undisturbed: Undisturbed) -> None:
    launch = start_ttprun(PLAIN, 2, script_args=["--steps", "400"])
    launch.wait_for_line(0, "step 2 ")

    asked = move(launch, 0, 1)
    result = launch.finish()

    assert asked.returncode == 2
    assert "no rank would be left to repair the others from" in asked.stderr
    assert (result.exit_code, result.incidents) == (0, []), result.story()


def test_a_rank_goes_to_a_device_that_no_rank_has_and_its_old_process_waits_for_that(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6")
    words = ["--device", "npu", "--gate", str(tmp_path / "gate")]
    launch = start_ttprun("gated_steps.py", 2, script_args=words, device="npu")
    launch.wait_for_line(0, "step 11 ")
    launch.wait_for_standby("ready")

    refused = [move(launch, 1, "--to-device", device) for device in ("4", "7")]
    words_of_move = [sys.executable, "-m", "ttprun", "move", "1", "--to-device", "6", "--run", str(launch.run_dir)]
    with subprocess.Popen(words_of_move, env=environment()) as asked:
        launch.wait_for_event("incident")
        (tmp_path / "gate").touch()
    result = launch.finish()

    assert [reply.returncode for reply in refused] == [2, 2], result.story()
    assert "the node of rank 1 has no device 4 that no rank has" in refused[0].stderr
    assert asked.returncode == 0, result.story()
    assert [Path(f"{words[-1]}-{rank}").read_text() for rank in (0, 1)] == ["4,5,6", "4,6,5"]
    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed("gated_steps.py", 2, words[:2], device="npu"))
