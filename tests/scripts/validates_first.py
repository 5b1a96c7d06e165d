"""Loaders that one line makes, the second of which is iterated over first: a validation before the training."""

import torch
import torch.distributed as dist
import torch.nn as nn
from around_the_loop import finish
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
training, held_out = [DataLoader(TensorDataset(torch.randn(size, 4)), 2, shuffle=size > 2) for size in (8, 2)]
torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def validate():
    losses = []
    for (inputs,) in held_out:
        losses.append(model.module(inputs).pow(2).mean())
    return torch.stack(losses).mean().item()


print(f"[rank {rank}] before the training: {validate():.6f}", flush=True)
for epoch in range(3):
    for (inputs,) in training:
        loss = (model(inputs) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"[rank {rank}] epoch {epoch}: {validate():.6f}", flush=True)

finish(model.state_dict().values(), "out", model.module.state_dict())
