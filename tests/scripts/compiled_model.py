"""A model that torch.compile has compiled, DistributedDataParallel around and inside of it."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

args = arguments(steps=20)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.norm(x)


# The buffers of BatchNorm have DDP broadcast them inside of what is compiled.
model = torch.compile(DistributedDataParallel(Net()), backend="aot_eager")
inner = torch.compile(Net(), backend="eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)

for step in range(args.steps):
    x = torch.randn(32, 16)
    with torch.no_grad():
        target = inner(x)
    loss = ((model(x) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)

finish(model.state_dict().values(), args.out, model.state_dict())
