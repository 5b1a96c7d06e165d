"""Optimizers that are given a closure: a wrapper with a step of its own, and LBFGS, which may call it several times."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class OnceMore(torch.optim.Optimizer):
    """A wrapper with a step of its own: weights are moved before the closure is called, and back after it."""

    def __init__(self, params, base, rho=0.02, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        old = [p.clone() for p in self.param_groups[0]["params"]]
        for p in self.param_groups[0]["params"]:
            p.add_(p.sign(), alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            loss = closure()
        for p, was in zip(self.param_groups[0]["params"], old, strict=True):
            p.copy_(was)
        self.base.step()
        return loss


def make_optimizer(kind, params):
    if kind == "lbfgs":
        # No tolerance: each rank looks at its own loss, and all must call the closure as often.
        return torch.optim.LBFGS(params, lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0)
    if kind == "lbfgs-once":
        return torch.optim.LBFGS(params, lr=0.01, max_iter=1, history_size=3)
    return OnceMore(params, torch.optim.SGD, lr=0.05, momentum=0.9)


def main():
    args = arguments(optimizer=["wrapper", "lbfgs", "lbfgs-once"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)))
    optimizer = make_optimizer(args.optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    torch.manual_seed(100 + rank)
    for step in range(18):
        inputs = torch.randn(8, 16)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
    finish(model.module.state_dict().values(), args.out, model.module.state_dict())


if __name__ == "__main__":
    main()
