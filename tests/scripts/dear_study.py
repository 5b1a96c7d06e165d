"""Keeps a study that makes all of its trials anew at each step: more objects than a step has time to record."""

import os
import sys

import torch
import torch.distributed as dist


class Study:
    def ask(self, step):
        self.trials = [[step, {"number": number}] for number in range(5000)]


out = sys.argv[1].removeprefix("--out=")
dist.init_process_group("gloo")
torch.manual_seed(0)
study = Study()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(64):
    study.ask(step)
    loss = model(torch.randn(3, 4)).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
if dist.get_rank() == 0:
    os.makedirs(out, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(out, "final.pt"))
dist.destroy_process_group()
