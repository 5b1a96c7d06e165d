"""Members of groups without a launcher: a program, and how a test runs three of it and replaces those that are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.alone.groups import begin_generation

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0  # three interpreters and torch, on a machine that may be busy
HEAD = """
import os, signal, sys
import torch
import torch.distributed as dist
from tests.alone.groups import Groups
from ttprun.introspect import stages

rank, port, kill_at = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)

class Counts:
    reissued = 0

    def reached(self, moment):
        self.reissued += moment == "reissue"

    def reached_collective(self, op, inputs):
        return False

    def reached_step_end(self): ...
    def connected(self, *of_group): ...

def die_at(place):
    if f"{rank} {place}" == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

counts = Counts()
stages.listeners.append(counts)
store = dist.TCPStore("127.0.0.1", port, is_master=False)
groups = Groups(store, rank, 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
"""
TAIL = """
ours = ("ttprun.agent", "ttprun.capture", "ttprun.rank", "ttprun.tensors", "ttprun.elastic_resume")
print("not wanted:", [name for name in sys.modules if name.startswith(ours)])
print("issued again:", counts.reissued)
print("unprotected:", groups.member.unprotected)
print("result:", x.double().sum().item().hex(), x[:3].tolist())
"""
LOOP = f"""{HEAD}
x = torch.linspace(0, 1, 1 << 20)
for step in range(4):
    small = torch.tensor([rank + x[7].item()])
    dist.all_reduce(small)
    die_at(f"before {{step}}")
    large = torch.sin(x * (rank + 1) + step)
    work = dist.all_reduce(large, async_op=True)
    die_at(f"inside {{step}}")
    work.wait()
    parts = [torch.zeros(4) for _ in range(3)]
    dist.all_gather(parts, large[:4] + rank)
    x = (x + large / 3) * 0.5 + small / 10 + torch.stack(parts).sum()
{TAIL}"""


def run(program: str, folder: Path, kill_at: str = "", again: str = "") -> list[dict[str, str]]:
    """What three members print, by the words before the colon; each that kills itself is replaced.

    kill_at   rank and place of a kill: "1 inside 2"
    again     the same for the first replacement
    """
    path = folder / "member.py"
    path.write_text(program)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(rank: int, where: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(path), str(rank), str(store.port), where]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
        )

    living = {rank: start(rank, kill_at) for rank in range(3)}
    if kill_at:
        lost = int(kill_at.partition(" ")[0])
        for where in (again, "") if again else ("",):
            process = living[lost]
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == -signal.SIGKILL, errors
            begin_generation(store)
            living[lost] = start(lost, where)
    printed = []
    try:
        for process in living.values():
            output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
            assert not errors, errors
            lines = (line.partition(": ") for line in output.splitlines())
            printed.append({name: text for name, _, text in lines})
    finally:
        for process in living.values():
            process.kill()
    return printed
