"""What is passed through to torch: protection ends with the reason, and the script goes on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.rank.test_gpus import unprotected
from tests.rank.worlds import run_world


def reduce_in_a_group_of_another_backend(rank: int) -> str:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    group = dist.new_group(backend="fake")
    dist.all_reduce(torch.ones(2), group=group)
    return unprotected()


def test_a_group_of_another_backend_than_gloo_is_not_repaired() -> None:
    found = run_world(reduce_in_a_group_of_another_backend)

    assert found == ["backend 'fake' of cpu is not repaired, only gloo, nccl, hccl (of a group)"] * 2


def receive_from_any(rank: int) -> tuple[str, int, list[float]]:
    x = torch.full((2,), float(rank))
    sender = dist.send(x, 0) if rank == 1 else dist.recv(x)
    return unprotected(), -1 if sender is None else sender, x.tolist()


def test_receiving_from_whoever_sends_is_not_repaired() -> None:
    found = run_world(receive_from_any)

    reason = "the script uses recv without src: which rank sends is not known before, which is not repaired"
    assert found[0] == (reason, 1, [1.0, 1.0])
