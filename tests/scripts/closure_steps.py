"""A loop that hands each batch's work to optimizer.step(closure), in the manner of Lightning."""

import os
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS_AN_EPOCH, EPOCHS, ACCUMULATE = 6, 3, 2


class Closure:
    """What an optimizer calls for a batch: forward, zero_grad, backward."""

    def __init__(self, step_fn, zero_grad_fn, backward_fn):
        self._result = None
        self._step_fn = step_fn
        self._zero_grad_fn = zero_grad_fn
        self._backward_fn = backward_fn

    def closure(self):
        result = self._step_fn()
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        self._backward_fn(result / ACCUMULATE)
        return result.detach()

    def consume_result(self):
        result, self._result = self._result, None
        return result

    def __call__(self):
        self._result = self.closure()
        return self._result


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


class Precision:
    def _after_closure(self, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def _wrap_closure(self, model, optimizer, closure):
        result = closure()
        self._after_closure(model, optimizer)
        return result

    def optimizer_step(self, optimizer, model, closure):
        return optimizer.step(closure=partial(self._wrap_closure, model, optimizer, closure))


class Trainer:
    def __init__(self, model, optimizer, scheduler, loader, rank):
        self.model, self.optimizer, self.scheduler, self.loader, self.rank = model, optimizer, scheduler, loader, rank
        self.precision = Precision()
        self.global_step = 0
        self.losses = []

    def training_step(self, batch):
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs), targets)

    def run_batch(self, batch, batch_idx):
        is_accumulating = (batch_idx + 1) % ACCUMULATE != 0
        closure = Closure(
            partial(self.training_step, batch),
            self.optimizer.zero_grad if batch_idx % ACCUMULATE == 0 else None,
            lambda loss: loss.backward(),
        )
        if is_accumulating:
            with self.model.no_sync() if isinstance(self.model, DDP) else nullcontext():
                closure()
        else:
            loss = self.precision.optimizer_step(self.optimizer, self.model, closure)
            self.scheduler.step()
            self.global_step += 1
            self.losses.append(loss.item())
            print(f"[rank {self.rank}] step {self.global_step} loss {loss.item()!r} of {closure.consume_result()!r}")

    def fit(self):
        for epoch in range(EPOCHS):
            self.loader.sampler.set_epoch(epoch)
            for batch_idx, batch in enumerate(self.loader):
                self.run_batch(batch, batch_idx)
            print(f"[rank {self.rank}] epoch {epoch} mean {sum(self.losses) / len(self.losses)!r}")


def make_optimizer(kind, params):
    if kind == "lbfgs":
        # No tolerance: each rank looks at its own loss, and all must call the closure as often.
        return torch.optim.LBFGS(params, lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0)
    if kind == "lbfgs-once":
        return torch.optim.LBFGS(params, lr=0.01, max_iter=1, history_size=3)
    if kind == "wrapper":
        return OnceMore(params, torch.optim.SGD, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=3e-3)


def main():
    args = arguments(optimizer=["adamw", "lbfgs", "lbfgs-once", "wrapper"])

    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(7)
    features = torch.randn(4 * ACCUMULATE * STEPS_AN_EPOCH * world_size, 16)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = DDP(model)
    optimizer = make_optimizer(args.optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    torch.manual_seed(100 + rank)
    trainer = Trainer(model, optimizer, scheduler, loader, rank)
    trainer.fit()

    dist.barrier()
    finish(model.module.state_dict().values(), args.out, model.module.state_dict())


if __name__ == "__main__":
    main()
