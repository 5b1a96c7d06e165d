"""DDP over a DataLoader with dropout; rank 1 raises in step BAD_STEP, behind its backward pass."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        step += 1
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean() * float(os.environ.get("AT_5" if step == 5 else "FACTOR", "1"))
        loss.backward()
        if rank == 1 and step == int(os.environ.get("BAD_STEP", "0")):
            raise ValueError(f"bad step {step}")
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print("mean loss", step, float(total))
dist.destroy_process_group()
