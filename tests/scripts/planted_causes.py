"""A small training with one thing changed by `--cause`, so that a trace differs from that of a run without one."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

AT = 12  # the step from which a cause counts, unless it is there from the start
SAVED_AT = 6


class Noisy(Dataset):
    """Samples with noise that is drawn when they are loaded."""

    def __init__(self, size, noise):
        self.values = torch.linspace(-1, 1, size * 8).view(size, 8)
        self.noise = noise

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        x = self.values[i] + self.noise * torch.rand(8)
        return x, x.sum().view(1)


class Net(nn.Module):
    """Two layers with dropout, and a large parameter whose sum several threads share."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 32), nn.Linear(32, 1), nn.Dropout(0.1)
        self.large = nn.Parameter(torch.randn(200_000) / 100)
        self.is_other_kernel = False

    def forward(self, x):
        if self.is_other_kernel:
            w = self.first.weight
            hidden = x[:, :3] @ w[:, :3].t() + x[:, 3:] @ w[:, 3:].t() + self.first.bias
        else:
            hidden = self.first(x)
        return self.second(self.drop(hidden.tanh())) + self.large.square().sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cause", default="")
    parser.add_argument("--save")
    args = parser.parse_args()
    cause, world = args.cause, int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2 if cause == "seed" else 1)
    net = Net()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    train = Noisy(48 * world, 0.02 if cause == "augmentation" else 0.01)
    sampler = DistributedSampler(train, world, rank, seed=7 if cause == "sampler" else 0)
    loader = DataLoader(train, batch_size=4, sampler=sampler, num_workers=2 if cause == "workers" else 0)
    validation = DataLoader(Noisy(8, 0.0), batch_size=4)
    if cause == "resume":
        saved = torch.load(f"{args.save}.{rank}")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])

    step = micro = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            is_due = step >= AT
            if cause == "skipped" and step == AT and not micro:
                micro = -1
                continue
            if cause == "weight" and step == AT and rank == world - 1:
                net.first.weight.data[0, 0] += 0.01
            if cause == "threads" and is_due:
                torch.set_num_threads(4)
            net.is_other_kernel = cause == "kernel" and is_due
            (model(x) - y).square().mean().backward()
            micro += 1
            if cause == "accumulation" and is_due and micro < 2:
                continue
            if cause == "clipping" and is_due:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step, micro = step + 1, 0
            if step == SAVED_AT and args.save and not cause:
                saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
                torch.save(saved, f"{args.save}.{rank}")
            if step % 8 == 0:
                net.train(cause == "evaluation")
                with torch.no_grad():
                    for x, _ in validation:
                        net(x)
                net.train()
    print("done", step, flush=True)


main()
