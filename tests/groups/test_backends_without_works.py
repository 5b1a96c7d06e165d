"""Backends that return no work for a synchronous operation, as NCCL's does since torch 2.8, and those that lack more.

The backend is gloo's, in a group in Python that returns None where `asyncOp` is false. torchrun trains with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.rank.worlds import FakeAgent, run_world, say
from ttprun.groups.connection import Transport
from ttprun.groups.device_link import LateLink
from ttprun.groups.links import TRANSPORTS
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank

STEPS = 3


class Backend(dist.ProcessGroup):
    """gloo's operations; those that are not asynchronous have ended when they return, and return None."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size)

    def getBackendName(self) -> str:
        return "silent"

    def _given(self, op: str, *args: Any) -> Any:
        work = getattr(self._gloo, op)(*args)
        if getattr(args[-1], "asyncOp", True):
            return work
        work.wait()
        return None

    def allreduce(self, *args: Any) -> Any:
        return self._given("allreduce", *args)

    def broadcast(self, *args: Any) -> Any:
        return self._given("broadcast", *args)

    def allgather(self, *args: Any) -> Any:
        return self._given("allgather", *args)

    def barrier(self, opts: Any) -> Any:
        return self._given("barrier", opts)

    def allreduce_coalesced(self, *args: Any) -> Any:
        return self._given("allreduce_coalesced", *args)

    def _allgather_base(self, *args: Any) -> Any:
        return self._given("_allgather_base", *args)

    def _reduce_scatter_base(self, output: Any, given: Any, options: Any) -> Any:
        whole, reduce = given.clone(), dist.AllreduceOptions()
        reduce.reduceOp = options.reduceOp
        self._gloo.allreduce([whole], reduce).wait()
        output.copy_(whole.view(self.size(), -1)[self.rank()].view_as(output))
        return None if not options.asyncOp else self._gloo.barrier()

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base


class Abortable(Backend):
    """The same, as one whose operations can be ended."""

    def abort(self) -> None:
        self._gloo.abort()


class WithoutAnything(Backend):
    """It has no works at all, and no abort."""

    def _given(self, op: str, *args: Any) -> Any:
        getattr(self._gloo, op)(*args).wait()


def begin(rank: int, place: str, kind: type[Backend]) -> None:
    """Under our hooks `gloo` is this backend; without them it is registered with torch."""
    dist.Backend.register_backend("silent", lambda store, rank, size, _: kind(store, rank, size), devices=["cpu"])
    if current() is not None:

        def make(member: Any) -> LateLink:
            return LateLink(member, "cpu", lambda store, member: kind(store, member.rank, member.size))

        transport = Transport("silent", frozenset({"cpu"}), make, is_late=True, gives_works=lambda: False)
        TRANSPORTS["silent"] = transport
    dist.init_process_group("silent", init_method=f"file://{place}", rank=rank, world_size=2)


def train(rank: int, place: str, kind: type[Backend] = Abortable) -> Any:
    """Each kind of call that a script makes: DDP, a barrier, losses, FSDP2's, coalesced and direct ones."""
    begin(rank, place, kind)
    torch.manual_seed(0)
    model = nn.Linear(8, 2, bias=False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        dist.barrier()
        if step == 1 and rank == 0 and current() is not None:
            say("second step")
        loss = wrapped(torch.full((1, 8), float(step + rank))).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        whole, part = torch.zeros(4), torch.zeros(2)
        dist.all_gather_into_tensor(whole, torch.full((2,), total.item() + rank))
        dist.reduce_scatter_tensor(part, whole)
        both = [torch.ones(1), torch.full((1,), 2.0)]
        with c10d._coalescing_manager():
            for one in both:
                dist.all_reduce(one)
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, {"rank": rank})
        direct = torch.ones(1)
        options: Any = dist.AllreduceOptions()
        options.asyncOp = False
        returned = [dist.group.WORLD.allreduce([direct], options)]  # type: ignore[union-attr]
        options.asyncOp = True
        work = dist.group.WORLD.allreduce([direct], options)  # type: ignore[union-attr]
        work.wait()
        returned.append(dist.all_reduce(direct))
        assert dist.all_reduce(direct, async_op=True).wait()
        seen.append([total.item(), part.tolist(), [one.item() for one in both], everywhere, direct.item(), returned])
    session = current()
    return seen, model.weight.detach().flatten().tolist(), "" if session is None else session.unprotected.text


def test_a_script_with_a_backend_that_returns_none_trains_as_under_torchrun_and_is_given_none(tmp_path: Any) -> None:
    expected = run_world(train, str(tmp_path / "plain"), is_managed=False, is_begun=False)

    found = run_world(train, str(tmp_path / "store"), is_begun=False)

    assert found == expected
    assert found[0][0][0][-1] == [None, None]


def reconnect(agent: FakeAgent) -> None:
    """In the middle of training all connections are broken, and made anew."""
    agent.wait_for(0, from_rank.Note, text="second step")
    agent.break_connections()
    agent.resume()


def test_a_synchronous_operation_without_a_work_is_issued_again_like_any_other(tmp_path: Any) -> None:
    expected = run_world(train, str(tmp_path / "plain"), is_managed=False, is_begun=False)

    found = run_world(train, str(tmp_path / "store"), is_begun=False, scenario=reconnect)

    assert found == expected


@pytest.mark.parametrize(("kind", "lacks"), [(Backend, "Backend has no abort()"), (WithoutAnything, "has no abort()")])
def test_a_backend_that_cannot_be_repaired_is_left_to_torch_with_the_reason(
    tmp_path: Any, kind: type[Backend], lacks: str
) -> None:
    expected = run_world(step_by_hand, str(tmp_path / "plain"), kind, is_managed=False, is_begun=False)

    found = run_world(step_by_hand, str(tmp_path / "store"), kind, is_begun=False)

    assert [weights for weights, _ in found] == [weights for weights, _ in expected]
    assert all(reason.startswith("a collective whose peer is lost cannot be ended") for _, reason in found)
    assert all(lacks in reason for _, reason in found)


def step_by_hand(rank: int, place: str, kind: type[Backend]) -> Any:
    begin(rank, place, kind)
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(STEPS):
        weight.grad = torch.full((4,), float(step + rank))
        dist.all_reduce(weight.grad)
        dist.barrier()
        optimizer.step()
    session = current()
    return weight.detach().tolist(), "" if session is None else session.unprotected.text
