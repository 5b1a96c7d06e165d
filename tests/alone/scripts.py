"""Scripts with a training loop, and how a test runs them: plainly, recorded up to a kill, and from there on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """
import os, random, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
random.seed(2)
losses = []

def show():
    ours = ("ttprun.agent", "ttprun.groups", "ttprun.rank", "ttprun.tensors", "ttprun.elastic_resume")
    print("not wanted:", [name for name in sys.modules if name.startswith(ours)], flush=True)

def took_step(loss):
    losses.append(loss.item())
    if len(losses) == int(os.environ.get("KILL_AFTER", "0")):
        show()
        os.kill(os.getpid(), signal.SIGKILL)
"""
TAIL = """
show()
print([loss.hex() for loss in losses])
print({name: float(value.double().sum()).hex() for name, value in model.state_dict().items()})
print(torch.randn(1).item().hex(), random.random().hex())
"""
LOADER = f"""{HEAD}
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
body = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)]
model = torch.nn.Sequential(*body, torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
for epoch in range(3):
    for number, (x, y) in enumerate(DataLoader(data, batch_size=4, shuffle=True)):
        loss = (model(x + 0.1 * torch.randn(4)) - y).square().mean() * random.uniform(0.5, 1.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        took_step(loss)
{TAIL}"""
RANGE = f"""{HEAD}
def train(model, optimizer, steps):
    best = float("inf")
    for step in range(steps):
        x = torch.randn(8, 3)
        loss = model(x).square().mean() + random.random()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            best = min(best, loss.item())
            took_step(loss)
    return best

model = torch.nn.Linear(3, 2)
best = train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 18)
print(best.hex())
{TAIL}"""


def run(folder: Path, *arguments: str, kill_after: int = 0) -> str:
    """Run Python in a folder to its end, or to its kill by itself after so many steps; returns what it has printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KILL_AFTER": str(kill_after), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == (-signal.SIGKILL if kill_after else 0), done.stderr
    return done.stdout
