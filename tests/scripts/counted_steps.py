"""A small loop of the common kind, which counts the calls that ttprun's own files make in its later steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

COUNTED = range(24, 40)
count = 0


def note(frame, event, argument):
    global count
    count += event in ("call", "c_call") and f"{os.sep}ttprun{os.sep}" in frame.f_code.co_filename


def main():
    global count
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 32), torch.randint(0, 4, (640,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    losses = []
    for step, (inputs, labels) in enumerate(loader):
        if step == COUNTED.start:
            sys.setprofile(note)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step == COUNTED.stop - 1:
            sys.setprofile(None)
            break
    if dist.get_rank() == 0:
        print(f"calls a step: {count // len(COUNTED)}.", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
