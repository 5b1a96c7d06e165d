"""What is passed through to torch: protection ends with the reason, and the script goes on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.rank.test_gpus import unprotected
from tests.rank.worlds import run_world
from ttprun.rank.session import current


def reduce_in_a_group_of(backend: str) -> str:
    from torch.testing._internal.distributed import fake_pg

    dist.Backend.register_backend("another", fake_pg._create_fake_pg, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(2), group=group)
    return unprotected()


def reduce_in_a_group_of_another_backend(rank: int) -> str:
    return reduce_in_a_group_of("another")


def reduce_in_a_group_that_communicates_nothing(rank: int) -> str:
    return reduce_in_a_group_of("fake")


def test_a_group_of_another_backend_than_gloo_is_not_repaired() -> None:
    found = run_world(reduce_in_a_group_of_another_backend)

    assert found == ["backend 'another' of cpu is not repaired, only gloo, nccl, hccl (of a group)"] * 2


def test_a_group_that_communicates_nothing_costs_no_protection() -> None:
    found = run_world(reduce_in_a_group_that_communicates_nothing)

    assert found == ["", ""]


def receive_from_any(rank: int) -> tuple[str, int, list[float]]:
    x = torch.full((2,), float(rank))
    sender = dist.send(x, 0) if rank == 1 else dist.recv(x)
    return unprotected(), -1 if sender is None else sender, x.tolist()


def test_receiving_from_whoever_sends_is_not_repaired() -> None:
    found = run_world(receive_from_any)

    reason = "the script uses recv without src (which rank sends is not known before: name it), which is not repaired"
    assert found[0] == (reason, 1, [1.0, 1.0])


class Divided(torch.optim.SGD):
    """As Muon and ZeRO by hand: each rank updates some of the parameters and sends them to the others."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for number, weight in enumerate(self.param_groups[0]["params"]):
            if number == dist.get_rank():
                weight.data.add_(weight.grad, alpha=-1)
            dist.broadcast(weight.data, number)


def step_with_work_divided_among_the_ranks(rank: int) -> tuple[str, bool, list[float]]:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = Divided(weights, lr=1.0)
    sum(weights).sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    session = current()
    return unprotected(), session is not None and session.has_collective_steps, [weight.item() for weight in weights]


def test_an_optimizer_that_divides_its_work_among_the_ranks_has_its_boundaries_before_its_steps() -> None:
    found = run_world(step_with_work_divided_among_the_ranks)

    assert found == [("", True, [-1.0, -1.0])] * 2
