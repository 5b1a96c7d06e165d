"""A mixture of experts: each rank holds other experts, and tokens travel to their experts and back by all_to_all.

With `--replicas 2` of 4 ranks two hold the same experts, and average their gradients; else an expert has one holder.
The router and the rest are the same in all ranks. A step is made of two micro-batches; between them the model is
evaluated.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn import functional


class Exchange(torch.autograd.Function):
    """Rows for each rank of a group, in exchange for its rows for this one; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class Experts(nn.Module):
    """This rank's experts; others hold the others."""

    def __init__(self, width: int, count: int, first: int, group: Any) -> None:
        super().__init__()
        self.count, self.group = count, group
        self.experts = nn.ModuleList()
        for number in range(first, first + count):
            torch.manual_seed(100 + number)
            self.experts.append(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Each token through its expert. tokens [n, width], chosen [n]; returns [n, width]."""
        holders = dist.get_world_size(self.group)
        order = chosen.argsort(stable=True)
        wanted = chosen.bincount(minlength=holders * self.count).view(holders, self.count)
        offered = torch.empty_like(wanted)
        dist.all_to_all_single(offered, wanted, group=self.group)
        sent, received = wanted.sum(1).tolist(), offered.sum(1).tolist()
        arrived = Exchange.apply(tokens[order], sent, received, self.group)
        whose = torch.arange(self.count, device=tokens.device).repeat(holders).repeat_interleave(offered.flatten())
        by_expert = whose.argsort(stable=True)
        parts = arrived[by_expert].split(whose.bincount(minlength=self.count).tolist())
        computed = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        returned = Exchange.apply(computed[by_expert.argsort()], received, sent, self.group)
        return returned[order.argsort()]


class Model(nn.Module):
    def __init__(self, width: int, experts: int, first: int, group: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.router = nn.Linear(width, experts * dist.get_world_size(group))
        self.experts = Experts(width, experts, first, group)
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.leave = nn.Linear(width, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.tanh(self.enter(x))
        odds, chosen = functional.softmax(self.router(tokens), 1).max(1)
        tokens = tokens + odds[:, None] * self.experts(tokens, chosen)
        return self.leave(self.dropout(self.norm(tokens)))


args = arguments(steps=20, replicas=1)

device = torch.accelerator.current_accelerator() or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo" if device.type == "cpu" else "hccl")
rank, world = dist.get_rank(), dist.get_world_size()
holders = world // args.replicas
of_experts = [dist.new_group(range(first, first + holders)) for first in range(0, world, holders)]
of_replicas = [dist.new_group(range(place, world, holders)) for place in range(holders)]
replica, place = divmod(rank, holders)

torch.manual_seed(0)
model = Model(16, 2, 2 * place, of_experts[replica]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

held_out = torch.randn(24, 12).to(device)
torch.manual_seed(1000 + rank)  # other tokens and another dropout in each rank
for step in range(args.steps):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(2):
        if micro == 1:
            model.eval()
            with torch.no_grad():
                evaluated = (model(held_out) - held_out.roll(1, 1)).square().mean().item()
            model.train()
        x = torch.randn(24, 12).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean() / 2
        loss.backward()
        total += loss.item()
    for name, parameter in model.named_parameters():
        if name.startswith("experts"):
            parameter.grad /= world
            if args.replicas > 1:
                dist.all_reduce(parameter.grad, group=of_replicas[place])
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {total!r} before {evaluated!r}", flush=True)

os.makedirs(args.out, exist_ok=True)
model = model.cpu()
finish(model.parameters(), args.out, model.state_dict())
