"""A script with a mistake in it: the layers do not fit, and the first forward raises in every rank."""

import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments()

dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(17, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(4, 8)).mean()
loss.backward()
optimizer.step()
