"""DistributedDataParallel in the ways in which scripts use it, and all that a world of two is compared by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.rank.collectives import CASES, plain

STYLES = ("plain", "unused parameters", "static graph", "views", "small buckets", "half hook", "no sync")


def losses_and_weights(
    rank: int, how: str, steps: int = 5, at_step: Callable[[int], None] = lambda step: None
) -> tuple[list[float], list[Any]]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 16),
        torch.nn.Linear(16, 1),
    )
    options: dict[str, Any] = {
        "unused parameters": {"find_unused_parameters": True},
        "static graph": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "small buckets": {"bucket_cap_mb": 0.0001},
    }.get(how, {})
    wrapped = DistributedDataParallel(model, **options)
    if how == "half hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(steps):
        at_step(step)
        if how == "no sync":
            with wrapped.no_sync():
                wrapped(torch.randn(4, 8)).square().mean().backward()
        loss = wrapped(torch.randn(4, 8)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.tolist() for p in [*model.parameters(), *model.buffers()]]


def every_case(rank: int) -> dict[str, Any]:
    """Train, then run all cases one after the other; an error's type stands for its result."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {f"ddp {how}": losses_and_weights(rank, how) for how in STYLES}
    for name, case in CASES.items():
        try:
            found[name] = plain(case(rank))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found
