"""`ttprun move`: healthy ranks give their places to new processes. `ttprun drain` is in test_nodes.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.harness import (
    PLAIN,
    Launch,
    StartTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    environment,
)

SHARDED = "fsdp_model.py"


def move(launch: Launch, *ranks: int) -> subprocess.CompletedProcess[str]:
    """Ask again as long as the ranks have not been compared."""
    words = [sys.executable, "-m", "ttprun", "move", *map(str, ranks), "--run", str(launch.run_dir), "--json"]
    while True:
        asked = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
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
