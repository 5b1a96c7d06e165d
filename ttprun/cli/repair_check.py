"""What `ttprun doctor` sees of a repair: it runs a job of two tiny ranks on the installed torch, and one is killed.

So a release of torch that nobody has tried is found before a job runs on it. Begin with `repair`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ttprun.chaos.drill.twins import FOREIGN, run_launcher
from ttprun.cli.finding import Finding

LIMIT_S = 90.0
FAULT = "kill:rank=1,step=3,phase=backward"
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + step + dist.get_rank())).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
_CURE = "install a release of torch that was tried (see README), and report this"


def repair(version: str, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Whether a killed rank is replaced here, on this torch. Blocks for `limit_s` at most; nothing remains afterwards.

    version   of torch, for what is said
    """
    with tempfile.TemporaryDirectory(prefix="ttprun-doctor-") as folder:
        took_s, why_not = _run(Path(folder), limit_s)
    if why_not:
        means = "a rank that dies is not replaced; training itself runs as under torchrun"
        yield Finding("software", "repair", f"on torch {version}: {why_not}", "fails", means, _CURE)
    else:
        yield Finding("software", "repair", f"a killed rank was replaced in {took_s:.1f} s")


def _run(folder: Path, limit_s: float) -> tuple[float, str]:
    """Run the tiny job; returns (seconds of its repair, why there was none: "" if there was)."""
    script, run_dir = folder / "two_tiny_ranks.py", folder / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    options = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--standbys",
        "0",
        "--redirects",
        "3",
        "--run-dir",
        str(run_dir),
    ]
    words = [sys.executable, "-m", "ttprun", *options, "--allow-faults", "--fault", FAULT, str(script)]
    twin = run_launcher(words, folder, folder, _environment(os.environ), limit_s, run_dir)
    if twin.problem:
        return 0.0, f"the job of two tiny ranks: {twin.problem}"
    incidents = twin.status.incidents if twin.status is not None else ()
    if twin.exit_code == 0 and [(past.rung, past.outcome) for past in incidents] == [("replace", "recovered")]:
        return incidents[0].total_s or 0.0, ""
    said = (folder / "launcher.log").read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in said if line.strip()] or ["the rank was not killed"]
    return 0.0, f"the job ended with exit code {twin.exit_code}: {incidents[0].reason if incidents else lines[-1]}"


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in inherited.items() if not FOREIGN.match(name)}
    here = str(Path(__file__).resolve().parents[2])  # the job may run in a folder from which ttprun cannot be imported
    path = os.pathsep.join(filter(None, (clean.get("PYTHONPATH"), here)))
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
