"""A42: replacements that are lost themselves, and ranks that are lost before a standby is warm."""

from __future__ import annotations

import contextlib
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


def test_ranks_that_are_all_stopped_for_a_while_are_not_all_taken_for_hung(
    start_ttprun: Callable[..., Launch], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    """The last one that holds the state is left alone: it may go on, as after `scontrol suspend` and `resume`."""
    gate = tmp_path / "gate"
    launch = start_ttprun(GATED, 3, script_args=["--gate", str(gate)], options=["--hang-timeout-s", "2"])
    launch.wait_for_line(0, "step 11 ")

    for pid in started(launch):
        os.kill(pid, signal.SIGSTOP)
    launch.wait_for_event("rank_killed")
    time.sleep(LOOKED_S)
    gate.touch()
    for pid in started(launch)[:3]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    assert_recovered_like(launch.finish(), undisturbed(GATED, 3))


def test_survivors_wait_for_an_agent_that_stands_still_and_go_on(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    """As under memory pressure: it has not ordered a recovery, since it could not, and not since there is none."""
    faults = ["stall:rank=0,step=12,phase=forward,seconds=45", "kill:rank=1,step=12,phase=backward"]

    result = run_ttprun(GATED, 3, faults=faults)

    assert_recovered_like(result, undisturbed(GATED, 3))
