"""Optimizers that divide their work among the ranks and communicate inside step(), in the ways that people write them.

--optimizer adamw    each rank updates a slice of every parameter: reduce_scatter, update, all_gather
--optimizer muon     each rank updates whole matrices in turn; vectors have an AdamW of their own that steps after it
--optimizer torch    DistributedDataParallel with torch's ZeroRedundancyOptimizer
"""

import os
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


class ShardedAdamW(torch.optim.Optimizer):
    """All gradients are reduced to slices, which are updated and gathered while the next ones are on their way."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            reduced, gathered = [], []
            for p in group["params"]:
                part = torch.empty_like(p.grad[: len(p) // world_size])
                reduced.append((part, dist.reduce_scatter_tensor(part, p.grad, async_op=True)))
            for p, (grad, work) in zip(group["params"], reduced, strict=True):
                work.wait()
                grad.div_(world_size)
                own = p[rank * len(grad) : (rank + 1) * len(grad)]
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(own), torch.zeros_like(own)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                own.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                scale = state["exp_avg_sq"].div(1 - beta2 ** state["step"]).sqrt_().add_(1e-8)
                own.addcdiv_(state["exp_avg"] / (1 - beta1 ** state["step"]), scale, value=-group["lr"])
                gathered.append(dist.all_gather_into_tensor(p, own.clone(), async_op=True))
            for work in gathered:
                work.wait()


class ShardedMuon(torch.optim.Optimizer):
    """Matrix number N is orthogonalized by rank N modulo the number of ranks, which gives it to the others."""

    def __init__(self, params, lr=2e-2, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                dist.all_reduce(p.grad)
                if number % world_size == rank:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    state["momentum_buffer"].lerp_(p.grad / world_size, 1 - group["momentum"])
                    p.add_(orthogonal(state["momentum_buffer"]), alpha=-group["lr"])
                dist.broadcast(p.data, number % world_size)


def orthogonal(matrix):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def make_optimizers(kind, model):
    if kind == "torch":
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)]
    if kind == "adamw":
        return [ShardedAdamW(model.parameters())]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [ShardedMuon(matrices), ShardedAdamW([p for p in model.parameters() if p.ndim < 2])]


def main():
    args = arguments(optimizer=["adamw", "muon", "torch"], gate="")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Dropout(0.1), nn.Linear(24, 12))
    model = DistributedDataParallel(net) if args.optimizer == "torch" else net
    optimizers = make_optimizers(args.optimizer, net)
    generator = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(50 + rank)  # another dropout in each rank
    for step in range(STEPS):
        x = torch.randn(16, 12, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        while step == 11 and args.gate and not os.path.exists(args.gate):
            time.sleep(0.02)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    moments = [
        value
        for optimizer in optimizers
        for state in getattr(optimizer, "optim", optimizer).state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    finish([*net.state_dict().values(), *moments], args.out, net.state_dict(), "weights and moments sha256")


if __name__ == "__main__":
    main()
