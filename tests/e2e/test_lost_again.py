"""A42: replacements that are lost themselves, and ranks that are lost before a standby is warm."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Launch, Run, assert_no_orphans, assert_same_outcome

GATED = "gated_steps.py"
LIMIT_S = 180.0
LOOKED_S = 1.2  # the agent looks twice a second for ranks that it does not hear


def started(launch: Launch, since: int = 0) -> list[int]:
    """Pids of the processes that ranks have got, without the first `since`."""
    assert launch.run_dir is not None
    with open(launch.run_dir / "events.jsonl", encoding="utf-8") as log:
        found = [json.loads(line) for line in log if '"rank_started"' in line and line.endswith("\n")]
    return [int(event["pid"]) for event in found[since:]]


def stop_next(launch: Launch, since: int) -> int:
    """Stop a replacement as soon as it is started, mostly before its first word; returns its pid."""
    give_up_at_s = time.monotonic() + LIMIT_S
    while not (found := started(launch, since)):
        assert time.monotonic() < give_up_at_s, "no replacement was started"
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


def assert_recovered_like(result: Run, reference: Run) -> None:
    outcomes = {incident["outcome"] for incident in result.incidents}
    assert outcomes == {"recovered"}, result.story()
    assert "rank_unprotected" not in {event["event"] for event in result.events}, result.story()
    assert_same_outcome(result, reference)
    assert_no_orphans(result)


def test_a_replacement_that_is_killed_between_its_fork_and_its_first_word_is_replaced(
    start_ttprun: Callable[..., Launch], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    launch = start_ttprun(GATED, 2, script_args=["--gate", str(gate)])
    launch.wait_for_standby("ready", limit_s=180.0)

    os.kill(started(launch)[1], signal.SIGKILL)
    silent = stop_next(launch, since=2)
    time.sleep(LOOKED_S)
    os.kill(silent, signal.SIGKILL)
    gate.touch()

    assert_recovered_like(launch.finish(), undisturbed(GATED, 2))


def test_a_standby_that_has_become_a_rank_runs_its_script_again_and_nothing_differs(
    start_ttprun: Callable[..., Launch], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    """Its own main() ends with the first run: what that still held was closed then, such as the board's number."""
    gate = tmp_path / "gate"
    faults = ["exception:rank=1,step=20,phase=backward"]
    options = ["--retry-on", "InjectedFaultError"]
    launch = start_ttprun(GATED, 2, script_args=["--gate", str(gate)], faults=faults, options=options)
    launch.wait_for_standby("ready", limit_s=180.0)

    os.kill(started(launch)[1], signal.SIGKILL)
    gate.touch()

    result = launch.finish()
    assert_recovered_like(result, undisturbed(GATED, 2))
    assert [incident["rung"] for incident in result.incidents] == ["replace", "rerun"], result.story()
