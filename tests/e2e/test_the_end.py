"""A rank is lost after its last step, while others have come to the end of the script: scenario A45.

Ranks that have come to their ends wait for the others, and hold what a replacement needs. What a rank has printed or
appended comes out once.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.harness import (
    RUN_LIMIT_S,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_no_orphans,
    assert_only_replaced,
    assert_same_outcome,
)

SCRIPT = "lost_at_the_end.py"
PLACES = [
    # place, rank that is lost, further arguments
    ("after destroy_process_group", 1, []),
    ("while it writes the final file", 0, []),
]


@pytest.mark.parametrize(("place", "rank", "further"), PLACES)
def test_a_rank_that_is_lost_when_the_others_have_come_to_their_ends_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, place: str, rank: int, further: list[str]
) -> None:
    arguments = ["--lost", str(rank), *further]

    run = run_ttprun(SCRIPT, 3, script_args=[*arguments, "--place", place])

    # It is answered once more that it was not killed yet: two incidents, or one with two attempts.
    assert_only_replaced(run, incidents=len(run.incidents))
    assert len(run.pids[rank]) == 3, run.story()
    assert_same_outcome(run, undisturbed(SCRIPT, 3, script_args=arguments, by_torchrun=True))
    for ledger in range(3):
        lines = (run.folder / "out" / f"ledger-{ledger}.txt").read_text().splitlines()
        assert [f"[rank {ledger}] {line}" for line in lines] == run.stdout[ledger]
    assert_no_orphans(run)


def test_a_rank_that_is_killed_when_its_script_has_ended_is_no_loss(
    start_ttprun: StartTtprun, undisturbed: Undisturbed
) -> None:
    arguments = ["--no-destroy", "--lost", "1"]
    launch = start_ttprun(SCRIPT, 2, script_args=[*arguments, "--place", "at the end"])
    pid = launch.wait_for_rank(1, RUN_LIMIT_S, phase="finished")["pid"]

    os.kill(pid, signal.SIGKILL)
    launch.wait_for_event("rank_exited", RUN_LIMIT_S)
    (launch.folder / "out" / "go").touch()
    run = launch.finish()

    assert_same_outcome(run, undisturbed(SCRIPT, 2, script_args=arguments, by_torchrun=True))
    assert run.incidents == [], run.story()
    assert "rank 1: signal 9 after the end of its script, so nothing is lost" in run.output
    assert_no_orphans(run)
