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


def send_to_the_other_rank(rank: int) -> tuple[str, list[float]]:
    x = torch.full((2,), float(rank))
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return unprotected(), x.tolist()


def test_point_to_point_operations_are_not_repaired() -> None:
    found = run_world(send_to_the_other_rank)

    reasons, received = zip(*found, strict=True)
    assert {reason.partition(": ")[2] for reason in reasons} == {"point-to-point operations are not repaired"}
    assert received == ([0.0, 0.0], [0.0, 0.0])
