"""A rank that does not come is found, named and replaced; links are rebuilt; a second fault begins anew: A19, A22.

Each test asserts that its fault was injected, and the incident's record. Limits are short, so that a test takes no
longer than a run; what limits are learnt from is tested on a fake clock in tests/recovery/test_hangs.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    EPOCHS,
    WHILE_TRUE,
    Run,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

LIMIT_S = 2.0
LIMIT = ["--hang-timeout", "2"]

HANGS = [
    # script, ranks, fault, how it is told
    (WHILE_TRUE, 2, "stop:rank=1,step=12,phase=forward", "its process was stopped by a signal"),
    (WHILE_TRUE, 2, "deadlock:rank=1,step=12,phase=in_step", "one of its threads holds the GIL and makes no progress"),
]

SECOND_FAULTS = [
    # phase, the rank that it strikes: the source of the state (0), another survivor (2)
    ("transfer", 0),
]


@pytest.mark.parametrize(("script", "ranks", "fault", "reported"), HANGS)
def test_a_rank_that_hangs_is_named_and_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, fault: str, reported: str
) -> None:
    result = run_ttprun(script, ranks, faults=[fault], options=LIMIT)

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(script, ranks))
    assert_survivors_kept_their_pids(result)
    assert result.incidents[0]["kind"] == "hang", result.story()
    assert reported in result.incidents[0]["reason"], result.story()
    (hung,) = events_named(result, "rank_hung")
    assert hung["limit_s"] == LIMIT_S, result.story()
    assert hung["frame"].startswith(script.removesuffix(".py")), result.story()
    (stacks,) = events_named(result, "stacks")
    assert sorted(rank for group in stacks["groups"] for rank in group["ranks"]) == list(range(ranks))
    assert [hung["rank"]] in [group["ranks"] for group in stacks["groups"]], result.story()


def test_an_endless_loop_is_found_later_since_it_might_be_work(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    result = run_ttprun(WHILE_TRUE, 2, faults=["busy:rank=1,step=12,phase=forward"], options=["--hang-timeout", "1"])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))
    assert "it works, but does not arrive" in result.incidents[0]["reason"]
    (hung,) = events_named(result, "rank_hung")
    assert (hung["way"], hung["limit_s"]) == ("busy", 10.0), result.story()


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        ("reset:rank=1,step=12,phase=backward", "Connection"),
        ("silent:rank=1,step=12,phase=backward", "all ranks are in allreduce"),
    ],
)
def test_a_link_that_breaks_is_mended_and_no_process_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, fault: str, reported: str
) -> None:
    result = run_ttprun(WHILE_TRUE, 2, faults=[fault], options=LIMIT)

    (incident,) = result.incidents
    assert (incident["kind"], incident["rung"], incident["outcome"]) == ("connection", "reconnect", "recovered"), (
        result.story()
    )
    assert (incident["ranks"], incident["steps_lost"]) == ([], 0)
    assert reported in incident["reason"], result.story()
    assert events_named(result, "fault_injected")
    assert all(len(pids) == 1 for pids in result.pids.values()), result.story()
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))


@pytest.mark.parametrize(("phase", "rank"), SECOND_FAULTS)
def test_a_survivor_that_is_killed_in_a_recovery_is_replaced_too(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str, rank: int
) -> None:
    faults = ["kill:rank=1,step=12,phase=backward", f"kill:rank={rank},phase={phase}"]

    result = run_ttprun(EPOCHS, 3, faults=faults)

    assert_only_replaced(result)
    assert result.incidents[0]["ranks"] == [1, rank]
    assert len(events_named(result, "fault_injected")) == 2, result.story()
    assert_same_outcome(result, undisturbed(EPOCHS, 3))
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize(("phase", "rank"), [("replay", 1)])
def test_a_rank_that_is_stopped_in_a_recovery_is_found_and_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str, rank: int
) -> None:
    faults = ["kill:rank=1,step=12,phase=backward", f"stop:rank={rank},phase={phase}"]

    result = run_ttprun(EPOCHS, 3, faults=faults, options=LIMIT)

    assert_only_replaced(result)
    assert len(events_named(result, "fault_injected")) == 2, result.story()
    assert [event["rank"] for event in events_named(result, "rank_hung")] == [rank]
    assert_same_outcome(result, undisturbed(EPOCHS, 3))


def events_named(result: Run, name: str) -> list[dict[str, Any]]:
    """Events of one name, in order."""
    return [event for event in result.events if event["event"] == name]


def test_a_rank_that_hangs_again_in_the_same_step_ends_the_job_with_its_stack_at_the_time_limit_of_its_group(
    run_ttprun: RunTtprun,
) -> None:
    result = run_ttprun("hangs_again.py", 2, options=LIMIT, script_args=["--group-limit-s", "25"])

    assert result.exit_code == 93, result.story()
    last = result.last_words
    assert last.startswith("ttprun: the job has ended: rank 1 hangs again in step 8 "), result.story()
    assert "hangs_again.py:25" in last
    assert "its state was saved" in last
    assert result.output.count("ttprun: rank 1 hangs again (") == 1
    assert "The process before it stood there too" in result.output
    assert result.output.count('hangs_again.py", line 25 in <module>') >= 2
    assert result.process_counts == [1, 2]


@pytest.mark.parametrize(
    ("options", "processes", "said"),
    [
        ([], [1, 1], "s it is replaced (--hang-timeout-s SECONDS sets that limit)"),
        (LIMIT, [1, 2], "The process before it stood there too, so this call is slow, or hangs for good"),
    ],
    ids=["by default", "with a limit"],
)
def test_a_rank_in_a_call_of_its_own_is_named_and_waited_for_and_the_job_is_done(
    start_ttprun: StartTtprun, tmp_path: Path, options: list[str], processes: list[int], said: str
) -> None:
    """A63: an upload, a copy, a child process, an evaluation on one rank, while the others go on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launch = start_ttprun("hangs_again.py", 2, options=options, script_args=["--pipe", str(pipe)])

    launch.wait_for_event("rank_late", is_again=options == LIMIT)
    pipe.write_text("at last")
    result = launch.finish()

    assert result.exit_code == 0, result.story()
    assert result.process_counts == processes, result.story()
    assert [incident["outcome"] for incident in result.incidents] == ["recovered"] * (sum(processes) - 2)
    where = "rank 0 waits" if not options else "the others wait"
    assert f"{where} for it: it is in hangs_again.py:25 in <module> (`open(args.pipe).read() if" in result.output
    assert said in result.output


def test_ranks_in_different_collectives_are_named_with_their_lines_and_what_all_hold_is_saved(
    run_ttprun: RunTtprun,
) -> None:
    result = run_ttprun("hangs_again.py", 2, options=LIMIT, script_args=["--leaves-loop"])

    assert result.exit_code == 1, result.story()
    last = result.last_words
    both = "rank 1 is in barrier (hangs_again.py:29 in <module>), rank 0 in allreduce (hangs_again.py:27 in <module>)"
    assert last.startswith(f"ttprun: the job has ended: {both}, after step 8: "), result.story()
    assert "its state was saved" in last
    assert "connections broke" not in result.output
