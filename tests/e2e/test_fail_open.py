"""A bug of ttprun's own, in a rank or in the launcher: the job runs as under torchrun, and the reason is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

BROKEN = "breaks_ttprun.py"
LAUNCHER = """
import importlib, sys

def broken(*args, **kwargs):
    raise ArithmeticError("a bug of ttprun's")

*path, name = {part!r}.split(".")
owner = importlib.import_module(".".join(path[:4]))
for step in path[4:]:
    owner = getattr(owner, step)
setattr(owner, name, broken)
from ttprun.cli.main import main
sys.exit(main({words!r}))
"""


@pytest.mark.parametrize("part", ["group", "step"])
def test_a_job_in_whose_ranks_ttprun_breaks_ends_as_under_torchrun(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, part: str
) -> None:
    result = run_ttprun(BROKEN, 2, script_args=["--part", part])

    assert_same_outcome(result, undisturbed(BROKEN, 2, ["--part", "nothing"]))
    assert "ArithmeticError" in result.status["protection"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("ttprun.cli.run.build_parser", "the job runs as under torchrun"),
        ("ttprun.agent.launcher.launch.Supervisor", "the job runs as under torchrun"),
    ],
)
def test_a_job_whose_launcher_breaks_runs_as_under_torchrun(tmp_path: Path, part: str, said: str) -> None:
    script = tmp_path / "script.py"
    # One write a line: `print` may need several, and those of two ranks can come in between each other.
    script.write_text("import os\nos.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format_map(os.environ).encode())\n")
    words = ["--nproc-per-node", "2", "--standbys", "0", "--run-dir", str(tmp_path / "run"), str(script)]

    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER.format(part=part, words=words)],
        cwd=tmp_path, env=harness.environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert done.stderr.count("ArithmeticError") == 1
    assert said in done.stderr
