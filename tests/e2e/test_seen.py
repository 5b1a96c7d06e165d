"""Ranks that were once unhooked without a word: hooked whatever comes before the import of torch, or said not to be."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import PLAIN, SCRIPTS, Launch, Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=20,phase=backward"


def test_a_probe_for_torch_before_its_import_leaves_the_ranks_hooked(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    probe = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    script = tmp_path / "probes.py"
    script.write_text(probe + (SCRIPTS / PLAIN).read_text())

    result = run_ttprun(str(script), 2, faults=[KILL])

    assert_only_replaced(result)
    assert result.incidents[0]["boundary"] == 20, result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))


def test_ranks_are_hooked_if_torch_and_its_functions_were_imported_before_us(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a .pth file in site-packages does it, and only in ranks: the standby must do the same."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "first.pth").write_text("import os; 'RANK' in os.environ and __import__('held')\n")
    (early / "held.py").write_text("import torch\nfrom torch.distributed import init_process_group as begin\n")
    (early / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(early)!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(early))
    script = tmp_path / "held_by_others.py"
    script.write_text(
        (SCRIPTS / PLAIN).read_text().replace('dist.init_process_group("', 'import sys; sys.modules["held"].begin("')
    )

    result = run_ttprun(str(script), 2, faults=[KILL])

    assert_only_replaced(result)
    assert result.incidents[0]["boundary"] == 20, result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))


def test_ranks_whose_python_skips_the_hooks_are_said_not_to_be_protected(
    start_ttprun: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all begin again from the top, nobody claims that no step was lost."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(python))

    launch = start_ttprun("waits.py", 2, script_args=["--place", "training"])
    launch.wait_for_event("rank_unprotected")
    launch.wait_for_file("out/stays-1")
    os.kill(pid_of(launch, 1), signal.SIGKILL)
    result = launch.finish()

    assert "started with -E, which ignores PYTHONPATH" in result.output, result.story()
    assert result.output.count("leave that option out (ttprun explain hooks-missing). If a rank is lost") == 1
    assert result.status["protection"].startswith("off: rank"), result.story()
    assert [incident["steps_lost"] for incident in result.incidents] == [None]
    assert result.exit_code == 137


@pytest.mark.usefixtures("new_pythons")  # a fork of a process with torch seems to use it itself
@pytest.mark.parametrize(
    ("way", "event", "why"),
    [
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, ARGUMENTS])",
            "rank_unseen",
            "but its child process does",
        ),
    ],
    ids=["subprocess"],
)
def test_a_script_that_hands_over_to_another_process_is_said_not_to_be_protected(
    start_ttprun: Callable[..., Launch], tmp_path: Path, way: str, event: str, why: str
) -> None:
    script = tmp_path / "hands_over.py"
    script.write_text(way.replace("ARGUMENTS", f"{str(SCRIPTS / 'waits.py')!r}, *sys.argv[1:]"))

    launch = start_ttprun(str(script), 2, script_args=["--place", "training"])
    launch.wait_for_file("out/stays-1")
    launch.wait_for_event(event, rank=1)
    os.kill(pid_of(launch, 1), signal.SIGKILL)
    result = launch.finish()

    assert why in result.output, result.story()
    assert [incident["steps_lost"] for incident in result.incidents] == [None], result.story()
    assert result.status["protection"].startswith("off: rank"), result.story()
    assert result.exit_code == 137


IN_A_PACKAGE = """
import torch, torch.distributed as dist
from package_with_a_loop import train

dist.init_process_group("gloo")
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)


def step():
    optimizer.zero_grad()
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()


train(step, 20)
"""


def test_a_script_that_cannot_be_repaired_is_reported_after_its_first_step_and_not_replayed(
    run_ttprun: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "package_with_a_loop.py").write_text(
        "def train(step, count):\n    for _ in range(count):\n        step()\n"
    )
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(IN_A_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    result = run_ttprun(str(script), 2, faults=["kill:rank=1,step=12,phase=backward"])

    assert result.output.count("not protected: rank") == 1, result.story()
    assert "the optimizer step is taken in a loop of train" in result.output
    assert "is met for the first time: its file is followed from the next run on" in " ".join(result.output.split())
    assert "If a rank is lost, the job ends" in result.output
    reported = [event["boundary"] for event in result.events if event["event"] == "rank_hindered"]
    assert reported == [1, 1], result.story()
    assert result.status["protection"].startswith("off: ranks 0, 1 could not be replaced now"), result.story()
    assert [incident["replay_s"] for incident in result.incidents] == [None]
    assert result.exit_code == 137


def pid_of(launch: Launch, rank: int) -> int:
    """The present process of a rank."""
    return launch.pids[rank][-1]
