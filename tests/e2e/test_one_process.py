"""One process without a process group is a job, too, scenario A68: saved and resumed like a job of several."""

from __future__ import annotations

import os
import subprocess
import sys
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Launch, Run, StartTtprun, Undisturbed, environment

SCRIPT = "each_for_itself.py"


class Job:
    """Launches of one process by the same command; it waits after each step from step 10 on while its gate is shut."""

    def __init__(self, start_ttprun: StartTtprun, folder: Path) -> None:
        self._start, self._folder = start_ttprun, folder

    def launch(self, args: Sequence[str] = (), options: Sequence[str] = ()) -> Launch:
        out, gate = self._folder / "out", self._folder / "gate"
        args = ["--gate", str(gate), *args]
        options = ["--save-dir", str(self._folder / "save"), *options]
        return self._start(SCRIPT, 1, options=options, script_args=args, out=out)

    def open_gates(self) -> None:
        for step in range(10, 41):
            (self._folder / f"gate{step}").touch()


@pytest.fixture
def job(start_ttprun: StartTtprun, tmp_path: Path) -> Job:
    return Job(start_ttprun, tmp_path)


def assert_resumed(run: Run, boundary: int, reference: Run) -> None:
    assert (run.status["resume"]["outcome"], run.status["resume"]["boundary"]) == ("recovered", boundary), run.story()
    assert run.hashes == reference.hashes, run.story()
    assert run.exit_code == 0


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)],
    ids=["TERM", "INT", "USR1"],
)
def test_one_process_that_a_signal_ends_goes_on_by_the_same_command(
    job: Job, undisturbed: Undisturbed, number: signal.Signals, exit_code: int
) -> None:
    launch = job.launch()
    launch.wait_for_line(0, "step 10 ")
    launch.process.send_signal(number)
    first = launch.finish()
    job.open_gates()
    second = job.launch().finish()

    assert first.exit_code == exit_code, first.story()
    assert "its state was saved, the same command resumes from it" in first.status["reason"], first.story()
    assert_resumed(second, 10, undisturbed(SCRIPT, 1))


def test_fails(job: Job, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed) -> None:
    job.open_gates()
    monkeypatch.setenv("FAILS", "1")
    first = job.launch().finish()
    print(first.story())
    monkeypatch.delenv("FAILS")
    second = job.launch().finish()
    print(second.story())
    assert_resumed(second, 19, undisturbed(SCRIPT, 1))


def test_now(job: Job, undisturbed: Undisturbed) -> None:
    launch = job.launch()
    launch.wait_for_line(0, "step 10 ")
    command = [sys.executable, "-m", "ttprun", "checkpoint", "now", "--run", str(launch.folder / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    print(result)
    os.kill(launch.wait_for_rank(0)["pid"], signal.SIGKILL)
    job.open_gates()
    run = launch.finish()
    print(run.story())
    assert run.hashes == undisturbed(SCRIPT, 1).hashes
    assert 0
