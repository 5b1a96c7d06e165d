"""Evaluations between the steps, which make objects that the set-up has not made: a lock's file, the best result."""

import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from filelock import FileLock
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Result:
    """Of an evaluation."""

    def __init__(self, value, step):
        self.value, self.step, self.used = value, step, 0


class Evaluation:
    """Keeps what it has made until the next one, as metrics do that gather what they are given in files."""

    def __init__(self, lock_file):
        self.lock_file, self.locks, self.best = lock_file, None, None

    def run(self, model, inputs, targets, step):
        lock = FileLock(self.lock_file)
        with lock, torch.no_grad():
            value = (model(inputs) - targets).abs().max().item()
        self.locks = [lock]
        if self.best is None or value < self.best.value:
            self.best = Result(value, step)

    def weight(self):
        if self.best is None:
            return 1.0
        self.best.used += 1
        return 1.0 + 0.01 * self.best.step + 0.001 * self.best.used


def main():
    options = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(64, 8), torch.randn(64, 1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    os.makedirs(options.out, exist_ok=True)
    evaluation = Evaluation(os.path.join(options.out, f"of-rank{dist.get_rank()}.lock"))
    for step in range(24):
        rows = torch.randint(0, 64, (8,))
        loss = evaluation.weight() * (model(inputs[rows]) - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 8 == 7:
            evaluation.run(model, inputs, targets, step)
    print(f"best {evaluation.best.used}", flush=True)
    finish(model.module.state_dict().values(), options.out, model.module.state_dict(), "weights sha256")


if __name__ == "__main__":
    main()
