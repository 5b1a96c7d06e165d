"""Tensor parallelism by hand: each rank holds its shard of the hidden layer, and `all_reduce` sums in the forward pass.

With `--replicas 2` of 4 ranks two hold the same shard, and average their gradients. The shards' biases begin as zeros,
equal in all ranks. With `--table` each rank has an embedding table of its own too."""

from typing import Any

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn


class SumOverShards(torch.autograd.Function):
    """The sum over the ranks; the gradient goes to each as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Model(nn.Module):
    """up and down are shards, the rest is the same in all ranks."""

    def __init__(self, width: int, shard: int, group: Any, table: bool) -> None:
        super().__init__()
        self.group = group
        self.table = nn.Embedding(64, 16) if table else None
        self.enter = nn.Linear(16, 16)
        torch.manual_seed(100 + shard)
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16, bias=False)
        nn.init.zeros_(self.up.bias)
        torch.manual_seed(1)
        self.leave = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        if self.table is not None:
            x = x + self.table(words)
        x = x + SumOverShards.apply(self.down(torch.relu(self.up(x))), self.group)
        return self.leave(x)


args = arguments(steps=30, replicas=1, table=False)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
shards = world // args.replicas
of_shards = [dist.new_group(range(first, first + shards)) for first in range(0, world, shards)]
of_replicas = [dist.new_group(range(shard, world, shards)) for shard in range(shards)]
replica, shard = divmod(rank, shards)

torch.manual_seed(0)
model = Model(24, shard, of_shards[replica], args.table)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

torch.manual_seed(1000 + replica)
losses = []
for step in range(args.steps):
    x = torch.randn(32, 16)
    words = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step * 97 + rank))
    loss = ((model(x, words) - x.sum(1, keepdim=True).sin()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("table"):
            continue
        if name.startswith(("up", "down")):
            dist.all_reduce(parameter.grad, group=of_replicas[shard])
            parameter.grad /= args.replicas
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()
    losses.append(loss.item())
    print(f"[rank {rank}] step {step} loss {loss.item()!r}")

print(f"[rank {rank}] losses {len(losses)} sum {sum(losses)!r}")
finish(model.parameters(), args.out, model.state_dict())
