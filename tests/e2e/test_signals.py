"""Signals to the launcher, scenario A27: exit codes, the grace period, and nothing that outlives them."""

from __future__ import annotations

import contextlib
import signal

import psutil
import pytest

from tests.e2e.harness import (
    Launch,
    StartTtprun,
    assert_no_orphans,
)

WAITS = "waits.py"
INTERRUPTED = "interrupted.py"
LOST = "kill:rank=1,step=3,phase=backward"  # its replacement then stays in its replay, and the recovery with it


def terminate_all(launch: Launch) -> None:
    """SIGTERM to the launcher and all that it has started, as Slurm's scancel and systemd do it."""
    launcher = psutil.Process(launch.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


@pytest.mark.parametrize(
    ("number", "exit_code", "place"),
    [(signal.SIGTERM, 143, "set-up"), (signal.SIGUSR1, 143, "training"), (signal.SIGINT, 130, "replay")],
    ids=["TERM-set-up", "USR1-training", "INT-replay"],
)
def test_a_signal_ends_the_job_with_its_exit_code_in_every_state(
    start_ttprun: StartTtprun, place: str, number: signal.Signals, exit_code: int
) -> None:
    launch = start_ttprun(WAITS, 2, faults=[LOST] if place == "replay" else [], script_args=["--place", place])
    launch.wait_for_file("out/stays-1")

    launch.process.send_signal(number)
    run = launch.finish()

    assert run.exit_code == exit_code, run.story()
    assert run.status["state"] == "stopped", run.story()
    assert run.status["reason"].startswith(f"ended by {number.name}"), run.story()
    assert [incident["outcome"] for incident in run.incidents] == (["failed"] if place == "replay" else [])
    assert_no_orphans(run)


@pytest.mark.parametrize(
    ("number", "exit_code", "script_args", "last_words"),
    [(signal.SIGINT, 130, ["--stays"], "interrupted"), (signal.SIGTERM, 143, ["--handles-term"], "stopped by itself")],
    ids=["INT", "TERM handled"],
)
def test_what_the_script_does_about_a_signal_it_does_at_once_and_in_all_ranks(
    start_ttprun: StartTtprun, number: signal.Signals, exit_code: int, script_args: list[str], last_words: str
) -> None:
    """Also in a rank that waits for gradients in native code, where Python calls no handler."""
    launch = start_ttprun(INTERRUPTED, 2, script_args=script_args)
    for rank in range(2):
        launch.wait_for_file(f"out/trains-{rank}")

    launch.process.send_signal(number)
    run = launch.finish()

    assert run.exit_code == exit_code, run.story()
    assert run.stdout == {0: [last_words], 1: [last_words]}, run.story()
    assert_no_orphans(run)


@pytest.mark.parametrize(
    "script_args",
    [["--workers", "1"], ["--raises"]],
    ids=["DataLoader's workers too", "one of which raises an error then"],
)
def test_a_job_all_of_whose_processes_are_signalled_saves_its_state_first(
    start_ttprun: StartTtprun, script_args: list[str]
) -> None:
    launch = start_ttprun(INTERRUPTED, 2, script_args=script_args)
    launch.wait_for_file("out/trains-1")

    terminate_all(launch)
    run = launch.finish()

    assert run.exit_code == 143, run.story()
    assert "its state was saved, the same command resumes from it" in run.status["reason"], run.story()
    assert_no_orphans(run)


def test_ranks_that_do_not_end_are_killed_when_the_grace_period_is_over(start_ttprun: StartTtprun) -> None:
    launch = start_ttprun(WAITS, 2, options=["--shutdown-timeout", "1"], script_args=["--place", "training", "--deaf"])
    launch.wait_for_file("out/stays-1")

    launch.process.send_signal(signal.SIGTERM)
    run = launch.finish()

    assert run.exit_code == 143, run.story()
    assert_no_orphans(run)


@pytest.mark.parametrize("place", ["replay"])
def test_a_second_interrupt_ends_ranks_at_once_that_ignore_the_first(start_ttprun: StartTtprun, place: str) -> None:
    launch = start_ttprun(
        WAITS,
        2,
        faults=[LOST] if place == "replay" else [],
        options=["--shutdown-timeout", "600"],
        script_args=["--place", place, "--deaf"],
    )
    launch.wait_for_file("out/stays-1")
    launch.process.send_signal(signal.SIGINT)
    launch.wait_for_event("ending")

    launch.process.send_signal(signal.SIGINT)
    run = launch.finish()

    assert run.exit_code == 130, run.story()
    assert_no_orphans(run)


def test_a_scheduler_that_signals_twice_and_differently_asks_for_one_thing(start_ttprun: StartTtprun) -> None:
    """Slurm signals all processes, and the batch shell, whose trap signals the launcher once more."""
    launch = start_ttprun(INTERRUPTED, 2)
    launch.wait_for_file("out/trains-1")

    terminate_all(launch)
    launch.process.send_signal(signal.SIGUSR1)
    launch.wait_for_event("ending")
    launch.process.send_signal(signal.SIGTERM)
    run = launch.finish()

    assert run.exit_code == 143, run.story()
    assert "its state was saved, the same command resumes from it" in run.status["reason"], run.story()
    assert_no_orphans(run)


def test_saving_ends_before_the_schedulers_grace_time_is_over(start_ttprun: StartTtprun) -> None:
    """Rank 1 stays in its forward pass, and would have its 30 s to act on the signal."""
    launch = start_ttprun(INTERRUPTED, 2, options=["--grace-s", "8"], script_args=["--stays", "--handles-term"])
    launch.wait_for_file("out/trains-1")

    launch.process.send_signal(signal.SIGTERM)
    run = launch.finish()

    assert run.exit_code == 143, run.story()
    assert "grace_time_over" in [event["event"] for event in run.events]
    assert run.status["reason"].startswith("ended by SIGTERM; its state was saved: "), run.story()
    assert_no_orphans(run)
