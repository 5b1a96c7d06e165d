"""What `ttprun doctor` sees of a repair: it runs a job of two tiny ranks on the installed torch, and one is killed.

So a release of torch that nobody has tried is found before a job runs on it. Begin with `repair`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttprun.cli.finding import Finding

LIMIT_S = 90.0
_END_LIMIT_S = 10.0
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
# What would steer the job: an outer launcher's variables, and settings of torchrun and ttprun.
_FOREIGN = re.compile(r"(PET|TTPRUN|TORCHELASTIC|TORCH_ELASTIC|GROUP|ROLE|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$")
_CURE = "install a release of torch that was tried (see README), and report this"


def repair(version: str, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Whether a killed rank is replaced here, on this torch. Blocks for `limit_s` at most; nothing remains afterwards.

    version   of torch, for what is said
    """
    with tempfile.TemporaryDirectory(prefix="ttprun-doctor-") as folder:
        outcome = _run(Path(folder), limit_s)
    if outcome["total_s"] is None:
        means = "a rank that dies is not replaced; training itself runs as under torchrun"
        yield Finding("software", "repair", f"on torch {version}: {outcome['reason']}", "fails", means, _CURE)
    else:
        yield Finding("software", "repair", f"a killed rank was replaced in {outcome['total_s']:.1f} s")


def _run(folder: Path, limit_s: float) -> dict[str, Any]:
    """Run the tiny job; returns {"total_s": of its repair, None if there was none, "reason": why not}."""
    script, run_dir = folder / "two_tiny_ranks.py", folder / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    options = ["--nproc-per-node", "2", "--standbys", "0", "--redirects", "3", "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ttprun", *options, "--allow-faults", "--fault", FAULT, str(script)],
        cwd=folder, env=_environment(os.environ), stdin=subprocess.DEVNULL, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return {"total_s": None, "reason": f"the job of two tiny ranks did not end within {limit_s:.0f} s"}
    try:
        incidents = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))["incidents"]
    except (OSError, ValueError, KeyError):
        incidents = []
    if process.returncode == 0 and [(one["rung"], one["outcome"]) for one in incidents] == [("replace", "recovered")]:
        return {"total_s": incidents[0]["total_s"], "reason": ""}
    lines = [line for line in said.splitlines() if line.strip()]
    why = incidents[0]["reason"] if incidents else (lines or ["the rank was not killed"])[-1]
    return {"total_s": None, "reason": f"the job ended with exit code {process.returncode}: {why}"}


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in inherited.items() if not _FOREIGN.match(name)}
    here = str(Path(__file__).resolve().parents[2])  # the job may run in a folder from which ttprun cannot be imported
    return clean | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (clean.get("PYTHONPATH"), here))),
    }


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks die with it
        process.communicate()
