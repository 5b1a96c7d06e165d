"""What lies on a GPU is not repaired yet: protection ends with that reason, and the script goes on as under torchrun.

There is no GPU here, so torch is made to believe in one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.rank.worlds import run_world
from ttprun.rank.session import current


def unprotected() -> str:
    session = current()
    assert session is not None
    return session.unprotected


def reduce_on_a_device(rank: int) -> Any:
    """Tensors without elements stand for those on a device: to torch they lie elsewhere than in the CPU's memory."""
    work = dist.all_reduce(torch.empty(3, device="meta"), async_op=True)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    return type(work).__name__ == "ManagedWork", unprotected(), x.tolist()


def test_a_collective_of_tensors_on_a_device_is_left_to_gloo() -> None:
    found = run_world(reduce_on_a_device)

    assert found == [(False, "collectives of tensors on meta are not repaired yet", [3.0, 3.0, 3.0])] * 2


def step_with_a_gpu(rank: int) -> Any:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    reasons = []
    for is_used in (False, True):
        torch.cuda.is_initialized = lambda is_used=is_used: is_used  # type: ignore[assignment,misc]
        weight.grad = torch.ones(2)
        optimizer.step()
        reasons.append(unprotected())
        dist.barrier()  # the other rank gives up at its next step, and this one hears of it
    return reasons, weight.tolist()


def test_a_script_that_uses_a_gpu_is_not_recorded_from_the_first_step_on_which_it_does() -> None:
    found = run_world(step_with_a_gpu)

    assert found == [(["", "state on a GPU is not recorded yet"], [-2.0, -2.0])] * 2
