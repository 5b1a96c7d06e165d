"""Chains of resumes: one process without resume code is interrupted three times, and nothing differs at the end.

Scripts are put together of a source of batches and an optimizer. Begin with `BATCHES` and `OPTIMIZERS`.
"""

from __future__ import annotations

import random
from pathlib import Path
from textwrap import indent

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_saved

EPOCHS, STEPS = 3, 8  # of each epoch
HEAD = '''
import argparse, hashlib, os, random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--out")
args = parser.parse_args()
torch.set_num_threads(1)
random.seed(1), np.random.seed(2), torch.manual_seed(3)


class Rows(Dataset):
    """Augmented at random, by three libraries."""

    def __init__(self, size=32):
        self.rows = torch.linspace(-1, 1, size * 8).view(size, 8)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        noise = torch.randn(8) + random.random() + np.random.rand()
        return self.rows[index] + 0.01 * noise.float()


class Stream(IterableDataset):
    """Each worker reads its part, through a small buffer from which it draws."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        buffer = []
        for index in range(info.id if info else 0, 32, info.num_workers if info else 1):
            buffer.append(torch.full((8,), index / 32) + 0.01 * torch.randn(8))
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


class Own(Sampler):
    """Draws from a generator of its own, and remembers what was seldom used."""

    def __init__(self, size):
        self.random, self.used = random.Random(5), [0] * size

    def __len__(self):
        return len(self.used)

    def __iter__(self):
        for _ in self.used:
            index = min(self.random.sample(range(len(self.used)), 4), key=self.used.__getitem__)
            self.used[index] += 1
            yield index


net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
'''
BODY = """
{batches}
{optimizer}
total = 0.0
for epoch in range({epochs}):
    for x in {source}:
{step}
        total += float(loss)
        print(f"epoch {{epoch}} loss {{float(loss)!r}}", flush=True)
parts = [value.numpy() for value in net.state_dict().values()] + [{weights}]
digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()
print(f"total {{total!r}} draw {{torch.rand(())!r}} {{random.random()!r}} {{np.random.rand()!r}} sha256 {{digest}}")
"""
# What comes before the loops, and over what the inner one runs.
BATCHES = {
    "map": ("loader = DataLoader(Rows(), batch_size=4, shuffle=True)", "loader"),
    "workers": ("loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2)", "loader"),
    "persistent": (
        "loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)",
        "loader",
    ),
    "iterable": ("loader = DataLoader(Stream(), batch_size=4)", "loader"),
    "iterable workers": ("loader = DataLoader(Stream(), batch_size=4, num_workers=2)", "loader"),
    "own sampler": ("rows = Rows()\nloader = DataLoader(rows, batch_size=4, sampler=Own(len(rows)))", "loader"),
    "own sampler, workers": (
        "rows = Rows()\nloader = DataLoader(rows, batch_size=4, sampler=Own(len(rows)), num_workers=2)",
        "loader",
    ),
    "weighted": (
        "drawn = WeightedRandomSampler(torch.rand(32), 32, generator=torch.Generator().manual_seed(4))\n"
        "loader = DataLoader(Rows(), batch_size=4, sampler=drawn)",
        "loader",
    ),
    "split": (
        "train, held_out = random_split(Rows(40), [32, 8])\nloader = DataLoader(train, batch_size=4, shuffle=True)",
        "loader",
    ),
    "generator": (
        "drawn = torch.Generator().manual_seed(4)\n"
        "loader = DataLoader(Rows(), batch_size=4, shuffle=True, generator=drawn, num_workers=2)",
        "loader",
    ),
    "stateful": (
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "loader = StatefulDataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2)",
        "loader",
    ),
    "by hand": (
        "rows, drawn = Rows(), np.random.default_rng(6)",
        "(torch.stack([rows[i] for i in part]) for part in np.split(drawn.permutation(32), 8))",
    ),
    "streamed": (
        "from datasets import Dataset as Table\n"
        'table = Table.from_dict({"x": [[i * k % 7 / 7 for k in range(8)] for i in range(32)]})\n'
        "table = table.to_iterable_dataset(num_shards=2).shuffle(seed=4, buffer_size=8)\n"
        'loader = DataLoader(table.with_format("torch"), batch_size=4)',
        '(table.set_epoch(epoch) or part["x"] for part in loader)',
    ),
}
LOSS = "loss = (net(x) - x.sum(1, keepdim=True)).square().mean()\n"
CLOSURE = f"def closure():\n    optimizer.zero_grad()\n{indent(LOSS, '    ')}    loss.backward()\n    return loss\n\n"
# What comes before the loops, a step, and what is trained if it is not `net`.
OPTIMIZERS = {
    "adamw": (
        "optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)\n"
        "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=24)",
        LOSS + "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\nscheduler.step()",
        "",
    ),
    "sgd": (
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)\n"
        "average = torch.optim.swa_utils.AveragedModel(net)",
        LOSS + "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\naverage.update_parameters(net)",
        "*(value.numpy() for value in average.state_dict().values())",
    ),
    "lbfgs": (
        "optimizer = torch.optim.LBFGS(net.parameters(), lr=0.05, max_iter=4)",
        CLOSURE + "loss = optimizer.step(closure)",
        "",
    ),
    "hand-written": (
        "",
        LOSS + "net.zero_grad()\nloss.backward()\nwith torch.no_grad():\n"
        "    for weight in net.parameters():\n        weight -= 0.02 * weight.grad",
        "",
    ),
    "numpy": (
        "weight = np.zeros(8)",
        "x = x.double().numpy()\nerror = x @ weight - x.sum(1)\nloss = (error**2).mean()\nweight -= 0.02 * error @ x",
        "weight",
    ),
}
NOT_YET = ("iterable",)
CHAINS = [*((batches, "adamw") for batches in BATCHES if batches not in NOT_YET), ("persistent", "sgd")]


def script_of(batches: str, optimizer: str) -> str:
    """A script that trains for 24 steps."""
    before, source = BATCHES[batches]
    made, step, weights = OPTIMIZERS[optimizer]
    step = indent(step, " " * 8)
    return HEAD + BODY.format(batches=before, source=source, optimizer=made, step=step, weights=weights, epochs=EPOCHS)


@pytest.mark.parametrize(("batches", "optimizer"), CHAINS)
def test_one_process_that_is_interrupted_three_times_ends_as_if_it_had_not_been(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, batches: str, optimizer: str
) -> None:
    """Preempted in one launch; in the next, which resumes in mid-epoch, killed and then preempted again."""
    for name, package in (("stateful", "torchdata"), ("streamed", "datasets")):
        if batches == name:
            pytest.importorskip(package)
    (tmp_path / "train.py").write_text(script_of(batches, optimizer))
    drawn = random.Random(f"{batches} {optimizer}")
    steps = sorted(drawn.sample(range(1, EPOCHS * STEPS - 2), 3))
    phases = drawn.choices(["before_step", "in_step", "after_step"], k=3)
    first, killed, second = (f"rank=0,step={step},phase={phase}" for step, phase in zip(steps, phases, strict=True))
    job = Series(run_ttprun, tmp_path, str(tmp_path / "train.py"), 1)

    job.launch([f"preempt:{first}"])
    job.launch([f"kill:{killed}", f"preempt:{second}"])
    job.launch()

    assert_saved(job.runs[0], "ended")
    assert_saved(job.runs[1], "ended")
    assert [incident["outcome"] for incident in job.runs[1].incidents] == ["recovered"], job.runs[1].story()
    assert [run.status["resume"]["outcome"] for run in job.runs[1:]] == ["recovered"] * 2, job.runs[2].story()
    assert_same_outcome(job.as_one(), undisturbed(str(tmp_path / "train.py"), 1))


@pytest.mark.parametrize(
    ("batches", "optimizer", "said"),
    [
        ("map", "hand-written", "8 backward passes, and the script has made no optimizer of torch: as long"),
        ("iterable", "adamw", "it draws random numbers (torch) where the training does, and a replay cannot"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_said_in_the_first_steps(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, batches: str, optimizer: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(script_of(batches, optimizer))

    run = run_ttprun(str(tmp_path / "train.py"), 1, options=["--save-dir", str(tmp_path / "save")])

    assert run.hashes == undisturbed(str(tmp_path / "train.py"), 1).hashes, run.story()
    assert said in run.output + str(run.status["not_proved"]), run.story()
