"""One process without a process group is a job, too, scenario A68: saved and resumed like a job of several."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Launch, Run, StartTtprun, Undisturbed, ttprun

SCRIPT = "each_for_itself.py"
Again = Callable[..., Launch]


@pytest.fixture
def again(start_ttprun: StartTtprun, tmp_path: Path) -> Again:
    """`again(is_open, *args)`: launches the same command; while its gate is shut, the script waits after step 10."""

    def launch(is_open: bool, *args: str) -> Launch:
        for step in range(10, 41) if is_open else ():
            (tmp_path / f"gate{step}").touch()
        words = ["--gate", str(tmp_path / "gate"), *args]
        options = ["--save-dir", str(tmp_path / "save")]
        launched = start_ttprun(SCRIPT, 1, options=options, script_args=words, out=tmp_path / "out")
        if not is_open:
            launched.wait_for_line(0, "step 10 ")
        return launched

    return launch


def assert_resumed(run: Run, boundary: int, reference: Run) -> None:
    resume = run.status["resume"]
    assert (resume["outcome"], resume["boundary"]) == ("recovered", boundary), run.story()
    assert (run.exit_code, run.hashes) == (0, reference.hashes), run.story()


@pytest.mark.parametrize(("name", "exit_code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_one_process_that_a_signal_ends_goes_on_by_the_same_command(
    again: Again, undisturbed: Undisturbed, name: str, exit_code: int
) -> None:
    launch = again(False)

    launch.process.send_signal(signal.Signals[name])
    first = launch.finish()
    second = again(True).finish()

    assert first.exit_code == exit_code, first.story()
    assert "its state was saved, the same command resumes from it" in first.status["reason"], first.story()
    assert re.search(r"resuming from step 10, saved \d+:\d\d:\d\d ago, /.*/step-00000010$", second.output, re.M)
    assert_resumed(second, 10, undisturbed(SCRIPT, 1))


def test_one_process_whose_script_fails_keeps_the_steps_that_it_has_taken(
    again: Again, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank lives at the end: what it kept in shared memory is written. What else is edited is named."""
    reference = undisturbed(SCRIPT, 1)
    monkeypatch.setenv("FAILS", "1")
    first = again(True).finish()
    monkeypatch.delenv("FAILS")
    monkeypatch.setenv("RATE", "0.02")
    second = again(True).finish()

    assert first.exit_code == 1, first.story()
    assert "from which the same command resumes once the script is corrected" in first.status["reason"], first.story()
    assert "lr: 0.02 in the script, 0.005 in the checkpoint, 0.005 is used" in second.output, second.story()
    assert_resumed(second, 19, reference)


def test_one_process_is_saved_on_request_and_goes_on_with_other_arguments_which_are_named(
    again: Again, undisturbed: Undisturbed
) -> None:
    """The scheduler's learning rate is the checkpoint's, so that the outcome is that of the old arguments."""
    launch = again(False)
    asked = ttprun("checkpoint", "now", "--run", str(launch.run_dir))
    launch.kill_agent()
    launch.finish()

    second = again(True, "--rate", "0.02", "--seconds", "0").finish()

    assert asked.returncode == 0, asked.stderr
    assert "(old: none, new: --rate 0.02 --seconds 0)" in second.output, second.story()
    assert "lr: 0.02 in the script, 0.01 in the checkpoint, 0.01 is used" in second.output, second.story()
    assert "bit-exact" not in second.output, second.story()
    assert_resumed(second, 10, undisturbed(SCRIPT, 1))
