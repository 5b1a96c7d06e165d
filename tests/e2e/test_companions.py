"""What is not needed to train and to replace a rank: it can be missing, and others can add to it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY, SCRIPTS, ttprun
from ttprun.cli.guide import read_page

TRIALS = ["chaos/trial", "cli/rehearsals.py"]
DOCTOR = ["cli/doctor.py", "cli/machine_checks.py", "cli/software_checks.py"]
SHOW = ["cli/run_reports.py", "cli/control.py", "cli/checkpoints_command.py", "cli/guide.py", "guide"]
PARTS = [TRIALS, DOCTOR, SHOW, ["chaos"], ["mindio"], ["elastic_resume"], ["web"]]
LAUNCH = ["--run-dir", "run", "--nproc-per-node", "2"]
KILLS = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
pids = [0, 0]
dist.all_gather_object(pids, os.getpid())
for step in range(12):
    if step == 8 and dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("gone", PARTS, ids=lambda gone: gone[0])
def test_the_core_trains_and_replaces_a_lost_rank_without_it(tmp_path: Path, gone: list[str]) -> None:
    tree = Path(shutil.copytree(REPOSITORY / "ttprun", tmp_path / "tree" / "ttprun"))
    for name in gone:
        (tree / name).unlink() if (tree / name).is_file() else shutil.rmtree(tree / name)

    (tmp_path / "kills.py").write_text(KILLS)

    done = ttprun(*LAUNCH, "kills.py", folder=tmp_path, PYTHONPATH=str(tree.parent))

    assert (done.returncode, "recovered in" in done.stderr) == (0, True), done.stderr


def test_the_example_of_the_guide_is_found_and_told_of_a_lost_rank(tmp_path: Path) -> None:
    toml, module = re.findall(r"```(?:toml|python)\n(.*?)```", read_page("extending"), re.DOTALL)
    (tmp_path / "counts_losses.py").write_text(module)
    installed = tmp_path / "counts_losses-1.dist-info"  # as pip would write it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: counts-losses\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(re.sub(r'project\.entry-points\."(.*)"|"', r"\1", toml))

    fault = "--allow-faults", "--fault", "kill:rank=1,step=8"
    done = ttprun(*LAUNCH, *fault, str(SCRIPTS / "epochs_dataloader.py"), folder=tmp_path, PYTHONPATH=str(tmp_path))
    lost = ttprun("lost", "run", folder=tmp_path, PYTHONPATH=str(tmp_path))

    assert "counts_losses: rank 1 was killed" in done.stderr, done.stderr
    assert (lost.returncode, lost.stdout) == (0, "rank 1: 1\n"), lost.stderr
