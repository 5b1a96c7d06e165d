"""What a set-up does before the loop, a standby may have done before the fault: `--standby-depth setup`."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.e2e.harness import Launch, Run, StartTtprun, Undisturbed, assert_no_orphans, assert_only_replaced
from tests.e2e.harness import assert_same_outcome as assert_same

SCRIPT = "heavy_setup.py"
AHEAD = ["--standby-depth", "setup"]


def kill_once_set_up(launch: Launch, ranks: int, lost: int) -> Run:
    """Kill a rank that waits before step 6 once all set-ups have been run ahead; the run to its end."""
    launch.wait_for_standby(f"set-ups run ahead: {ranks} of {ranks}", limit_s=180.0)
    os.kill(launch.pids[lost][-1], signal.SIGKILL)
    launch.wait_for_event("rank_replayed")
    (launch.folder / "out" / "go").touch()
    result = launch.finish()
    assert_no_orphans(result)
    return result


def test_a_replacement_whose_set_up_was_run_ahead_begins_with_the_loop(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    launch = start_ttprun(SCRIPT, 2, options=AHEAD, script_args=["--wait"])

    result = kill_once_set_up(launch, 2, lost=1)

    assert_only_replaced(result)
    assert_same(result, undisturbed(SCRIPT, 2))
    ahead: list[dict[str, Any]] = [one for one in result.events if one["event"] == "set_up_ahead"]
    replayed = [one for one in result.events if one["event"] == "rank_replayed"]
    of_lost = next(one["took_s"] for one in ahead if one["rank"] == 1)
    assert len(replayed) == 1
    assert replayed[0]["setup_s"] < of_lost / 3  # its first step alone is left of it


def test_a_set_up_that_the_rank_has_gone_through_again_is_not_used(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    again = ["--again"]
    launch = start_ttprun(SCRIPT, 2, options=AHEAD, script_args=["--wait", *again])

    result = kill_once_set_up(launch, 2, lost=0)

    assert_same(result, undisturbed(SCRIPT, 2, script_args=again))
    assert [one["reason"] for one in result.events if one["event"] == "set_up_of_no_use"] == [
        "a collective of the set-up was issued again since"
    ]
    assert {incident["outcome"] for incident in result.incidents} == {"recovered"}, result.story()
    assert {incident["steps_lost"] for incident in result.incidents} == {0}, result.story()
