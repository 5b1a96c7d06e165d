"""The managed process group: two real processes, real gloo, a fake agent between them."""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.rank.operations import OPERATIONS
from ttprun.rank.process_group import ManagedGroup
from ttprun.rank.session import current


def ours(rank: int, n: int = 3) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 10 * (rank + 1)


def all_reduce(rank: int, op: Any = dist.ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Any:
    x = ours(rank).to(dtype)
    dist.all_reduce(x, op=op)
    return x


def all_reduce_async(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x, work.is_completed(), [t.clone() for t in work.result()]


def all_reduce_future(rank: int) -> Any:
    work = dist.all_reduce(ours(rank), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2).wait()


def all_reduce_of_a_view(rank: int) -> Any:
    x = torch.zeros(2, 6)
    x[rank, ::2] = 1.0
    part = x[:, ::2].contiguous()
    dist.all_reduce(part)
    return part


def reduce(rank: int) -> Any:
    x = ours(rank)
    dist.reduce(x, 1)
    return x if rank == 1 else None


def broadcast(rank: int, root: int) -> Any:
    x = ours(rank)
    dist.broadcast(x, root)
    return x


def all_gather(rank: int) -> Any:
    parts = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(parts, ours(rank))
    return parts


def all_gather_into_tensor(rank: int) -> Any:
    whole = torch.zeros(6)
    dist.all_gather_into_tensor(whole, ours(rank))
    return whole


def gather(rank: int) -> Any:
    parts = [torch.zeros(3) for _ in range(2)] if rank == 0 else None
    dist.gather(ours(rank), parts, dst=0)
    return parts


def scatter(rank: int) -> Any:
    x = torch.zeros(3)
    dist.scatter(x, [ours(0), ours(1)] if rank == 1 else None, src=1)
    return x


def reduce_scatter(rank: int) -> Any:
    x = torch.zeros(3)
    dist.reduce_scatter(x, [ours(rank), ours(rank) * 2])
    return x


def reduce_scatter_tensor(rank: int) -> Any:
    x = torch.zeros(3)
    dist.reduce_scatter_tensor(x, ours(rank, 6))
    return x


def all_to_all(rank: int) -> Any:
    out = [torch.zeros(2) for _ in range(2)]
    dist.all_to_all(out, [ours(rank, 2), ours(rank, 2) * 2])
    return out


def all_to_all_single(rank: int) -> Any:
    x = torch.zeros(4)
    dist.all_to_all_single(x, ours(rank, 4))
    return x


def all_to_all_uneven(rank: int) -> Any:
    x = torch.zeros(3 if rank == 0 else 5)
    splits = [[1, 3], [2, 2]][rank]
    dist.all_to_all_single(x, ours(rank, 4), [1, 2] if rank == 0 else [3, 2], splits)
    return x


def barriers(rank: int) -> Any:
    dist.barrier()
    work = dist.barrier(async_op=True)
    return work.wait()


def all_reduce_coalesced(rank: int) -> Any:
    xs = [ours(rank), ours(rank, 2)]
    dist.all_reduce_coalesced(xs)
    return xs


def all_gather_coalesced(rank: int) -> Any:
    out = [[torch.zeros(3), torch.zeros(2)] for _ in range(2)]
    dist.all_gather_coalesced(out, [ours(rank), ours(rank, 2)])
    return out


def coalescing_manager(rank: int) -> Any:
    xs = [ours(rank), ours(rank)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    return xs


def objects(rank: int) -> Any:
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (100 * (rank + 1))})
    sent: list[Any] = [("seed", 7)] if rank == 0 else [None]
    dist.broadcast_object_list(sent, src=0)
    at_root: list[Any] | None = [None, None] if rank == 0 else None
    dist.gather_object(("g", rank), at_root, dst=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, src=0)
    return everything, sent, at_root, mine


def functional_all(rank: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    return [
        functional.all_reduce(ours(rank), "sum", group) + 0,
        functional.all_gather_tensor(ours(rank), 0, group) + 0,
        functional.reduce_scatter_tensor(ours(rank, 4), "sum", 0, group) + 0,
        functional.broadcast(ours(rank), 1, group) + 0,
        functional.all_to_all_single(ours(rank, 4), None, None, group) + 0,
        *[x + 0 for x in functional.all_reduce_coalesced([ours(rank), ours(rank, 2)], "sum", group)],
        *[x + 0 for x in functional.all_gather_into_tensor_coalesced([ours(rank), ours(rank, 2)], group)],
        *[
            x + 0
            for x in functional.reduce_scatter_tensor_coalesced([ours(rank, 4), ours(rank, 2)], "sum", [0, 0], group)
        ],
    ]


def further_groups(rank: int) -> Any:
    both = dist.new_group([0, 1])
    alone = [dist.new_group([member]) for member in range(2)]
    reversed_ = dist.new_group([1, 0], timeout=timedelta(seconds=9))
    x, y, z = ours(rank), ours(rank), ours(rank)
    dist.all_reduce(x, group=both)
    dist.all_reduce(y, group=alone[rank])
    dist.broadcast(z, 1, group=reversed_)
    found = [
        x, y, z, dist.get_rank(both), dist.get_world_size(alone[rank]), dist.get_process_group_ranks(both),
        dist.get_backend(both), dist.get_rank(alone[1 - rank]),
    ]  # fmt: skip
    dist.destroy_process_group(both)
    return found


def what_the_world_is(rank: int) -> Any:
    return [
        dist.get_backend(), dist.get_rank(), dist.get_world_size(), dist.is_initialized(),
        dist.get_process_group_ranks(dist.group.WORLD), dist.is_gloo_available(),
    ]  # fmt: skip


def mesh(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = ours(rank)
    dist.all_reduce(x, group=found.get_group("dp"))
    return x, found.get_local_rank(), found.size()


def distributed_tensor(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = distribute_tensor(torch.arange(8.0).reshape(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    return found.redistribute(placements=[Replicate()]).to_local(), (found @ torch.ones_like(found).t()).full_tensor()


def monitored_barrier(rank: int) -> Any:
    return dist.monitored_barrier()


def send_and_receive(rank: int) -> Any:
    x = ours(rank)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        y = torch.zeros(3)
        dist.recv(y, 0)
        dist.send(y + 1, 0)
    return x


def batched_send_and_receive(rank: int) -> Any:
    got = torch.zeros(3)
    other = 1 - rank
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ours(rank), other), dist.P2POp(dist.irecv, got, other)])
    for work in works:
        work.wait()
    return got


def calls_on_the_group_itself(rank: int) -> Any:
    group: Any = dist.group.WORLD
    x, y = ours(rank), ours(rank)
    group.allreduce(x).wait()
    group.allreduce([y], dist.ReduceOp.MAX).wait()
    z = ours(rank)
    group.broadcast(z, root=1).wait()
    parts = [torch.zeros(3) for _ in range(2)]
    group.allgather([parts], [ours(rank)]).wait()
    group.barrier().wait()
    return x, y, z, parts, group.size(), group.rank()


def all_reduce_sparse(rank: int) -> Any:
    x = torch.eye(3)[rank:].to_sparse() if rank else torch.eye(3)[:2].to_sparse()
    dist.all_reduce(x)
    return x.to_dense()


def sparse_embedding(rank: int) -> Any:
    model = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.tensor([1, rank + 2])).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.to_dense()


CASES: dict[str, Callable[[int], Any]] = {
    "allreduce": all_reduce,
    "allreduce max": functools.partial(all_reduce, op=dist.ReduceOp.MAX),
    "allreduce product": functools.partial(all_reduce, op=dist.ReduceOp.PRODUCT),
    "allreduce average": functools.partial(all_reduce, op=dist.ReduceOp.AVG),
    "allreduce int": functools.partial(all_reduce, dtype=torch.int64),
    "allreduce half": functools.partial(all_reduce, dtype=torch.float16),
    "allreduce bfloat16": functools.partial(all_reduce, dtype=torch.bfloat16),
    "allreduce async": all_reduce_async,
    "allreduce future": all_reduce_future,
    "allreduce of a view": all_reduce_of_a_view,
    "allreduce sparse": all_reduce_sparse,
    "allreduce_coalesced": all_reduce_coalesced,
    "coalescing manager": coalescing_manager,
    "broadcast": functools.partial(broadcast, root=0),
    "broadcast from 1": functools.partial(broadcast, root=1),
    "reduce": reduce,
    "allgather": all_gather,
    "allgather_coalesced": all_gather_coalesced,
    "all_gather_single": all_gather_into_tensor,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_tensor,
    "alltoall": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single uneven": all_to_all_uneven,
    "barrier": barriers,
    "objects": objects,
    "functional collectives": functional_all,
    "further groups": further_groups,
    "the world": what_the_world_is,
    "device mesh": mesh,
    "distributed tensor": distributed_tensor,
    "calls on the group itself": calls_on_the_group_itself,
    "monitored barrier": monitored_barrier,
    "sparse embedding": sparse_embedding,
    "send and receive": send_and_receive,
    "batched send and receive": batched_send_and_receive,
}


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


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@pytest.fixture(scope="module")
def gloo_and_ours() -> tuple[list[Any], list[Any]]:
    return run_world(every_case, is_managed=False), run_world(every_case)


@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_gloo_gives(name: str, gloo_and_ours: tuple[list[Any], list[Any]]) -> None:
    gloo, managed = gloo_and_ours

    expected, found = ([result[name] for result in results] for results in (gloo, managed))

    if "Error" in str(expected):
        assert [str(e).split(":")[0] for e in found] == [str(e).split(":")[0] for e in expected]
    else:
        assert found == expected


def test_every_operation_of_torchs_group_is_known() -> None:
    """A new release of torch may add one: it must be in OPERATIONS, or it goes past the journal."""
    from torch._C._distributed_c10d import Backend

    known = {*OPERATIONS, "send", "recv", "recv_anysource"}
    other = {
        "abort", "eager_connect_single_device", "get_error", "get_mem_allocator", "name", "options", "rank", "shutdown", "size",
        "supports_coalescing", "supports_splitting", "supports_time_estimate", "supports_tensor_alloc", "allocate_tensor",
        "comm_split_count", "_end_coalescing", "_start_coalescing", "_get_backend_name", "get_backend_name",
    }  # fmt: skip

    unknown = {
        name for name in vars(Backend) if not name.startswith("__") and name not in known | other
        and not name.startswith(("_set", "_get", "set", "supports", "_verify", "_wait", "bound_device", "mem_", "group_"))
    }  # fmt: skip

    assert {
        name for name in unknown if any(word in name for word in ("reduce", "gather", "scatter", "broadcast", "all_to"))
    } == set()


# Training.

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


@pytest.mark.parametrize("how", STYLES)
def test_ddp_comes_to_the_weights_of_plain_gloo(how: str, gloo_and_ours: tuple[list[Any], list[Any]]) -> None:
    gloo, managed = gloo_and_ours

    assert [result[f"ddp {how}"] for result in managed] == [result[f"ddp {how}"] for result in gloo]


# Broken connections.


def several_at_once(rank: int) -> Any:
    tensors = [ours(rank) * (k + 1) for k in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in works[::-1]:
        work.wait()
    return tensors


def chained_futures(rank: int) -> Any:
    tensors = [ours(rank), ours(rank) * 2]
    futures = [dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] + 1) for x in tensors]
    return [future.wait() for future in futures]


def wait_on_another_thread(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join(20)
    return x, thread.is_alive()


def ask_until_completed(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    end = threading.Event()
    while not work.is_completed():
        end.wait(0.01)
    return x


HANGING: dict[str, Callable[[int], Any]] = {
    "allreduce": all_reduce,
    "allreduce future": all_reduce_future,
    "several at once": several_at_once,
    "chained futures": chained_futures,
    "another thread": wait_on_another_thread,
    "polling": ask_until_completed,
    "broadcast": functools.partial(broadcast, root=0),
    "broadcast from 1": functools.partial(broadcast, root=1),
    "allgather": all_gather,
    "all_gather_single": all_gather_into_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "gather": gather,
    "scatter": scatter,
    "all_to_all_single": all_to_all_single,
    "allreduce_coalesced": all_reduce_coalesced,
    "functional collectives": functional_all,
    "objects": objects,
    "barrier": barriers,
}
CUT_STYLES = ("plain", "small buckets", "views", "half hook")
SUMS = [30.0, 32.0, 34.0]
FLOAT = "torch.float32"
EXPECTED_AFTER_HANGING: dict[str, Any] = {
    "several at once": [[[FLOAT, [(k + 1) * s for s in SUMS]] for k in range(4)]] * 2,
    "chained futures": [[[FLOAT, [s + 1 for s in SUMS]], [FLOAT, [2 * s + 1 for s in SUMS]]]] * 2,
    "another thread": [[[FLOAT, SUMS], False]] * 2,
    "polling": [[FLOAT, SUMS]] * 2,
}


def be_held_up(rank: int, name: str) -> None:
    """Rank 0 goes on into an operation; rank 1 waits until the connection has been broken and mended."""
    if rank == 0:
        say(f"waiting {name}")
    else:
        wait_for(f"go {name}")


def mend(agent: FakeAgent, name: str, times: int = 1) -> None:
    """In the scenario: what a broken link brings about while rank 0 waits."""
    agent.wait_for(0, "note", text=f"waiting {name}")
    agent.pause()
    for _ in range(times):
        agent.break_connections()
        if times > 1:
            agent.break_connections()
        agent.resume()
    agent.tell_value(1, f"go {name}")


def hang_everywhere(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    session = current()
    assert session is not None
    found: dict[str, Any] = {}
    for name, call in HANGING.items():
        before = ours(rank)
        dist.all_reduce(before)
        taken = before.clone()
        before.mul_(0).add_(rank)  # the script goes on with its tensor
        be_held_up(rank, name)
        result = call(rank)
        after = ours(rank)
        dist.all_reduce(after)
        found[name] = [*plain([result, taken, before, after]), session.unprotected]
    return found


def mend_everywhere(agent: FakeAgent) -> None:
    for name in HANGING:
        mend(agent, name)


@pytest.fixture(scope="module")
def after_hanging() -> list[Any]:
    return run_world(hang_everywhere, scenario=mend_everywhere)


@pytest.mark.parametrize("name", HANGING)
def test_a_rank_that_waits_when_the_connection_breaks_gets_the_right_result(
    name: str, after_hanging: list[Any], gloo_and_ours: tuple[list[Any], list[Any]]
) -> None:
    expected = EXPECTED_AFTER_HANGING.get(name) or [result[name] for result in gloo_and_ours[0]]

    found = [result[name] for result in after_hanging]

    assert [result[0] for result in found] == expected
    assert [result[4] for result in found] == ["", ""]


@pytest.mark.parametrize("name", HANGING)
def test_what_was_done_before_a_break_stays_as_the_script_has_left_it(name: str, after_hanging: list[Any]) -> None:
    found = [result[name] for result in after_hanging]

    assert [result[1:4] for result in found] == [
        [[FLOAT, SUMS], [FLOAT, [rank] * 3], [FLOAT, SUMS]] for rank in (0.0, 1.0)
    ]


def train_and_be_cut(rank: int) -> dict[str, Any]:
    def at_step(step: int, how: str) -> None:
        if step == 3:  # rank 0 hangs in the first all-reduce of its backward pass
            be_held_up(rank, how)

    return {how: losses_and_weights(rank, how, at_step=functools.partial(at_step, how=how)) for how in CUT_STYLES}


def mend_in_training(agent: FakeAgent) -> None:
    for how in CUT_STYLES:
        agent.boundary += 3
        mend(agent, how)
        agent.boundary += 2


@pytest.fixture(scope="module")
def after_cut() -> list[Any]:
    return run_world(train_and_be_cut, scenario=mend_in_training)


@pytest.mark.parametrize("how", CUT_STYLES)
def test_ddp_comes_to_the_same_weights_if_the_connection_breaks_in_a_backward_pass(
    how: str, after_cut: list[Any], gloo_and_ours: tuple[list[Any], list[Any]]
) -> None:
    assert [result[how] for result in after_cut] == [result[f"ddp {how}"] for result in gloo_and_ours[0]]


def hang_once(rank: int) -> Any:
    be_held_up(rank, "once")
    return plain(several_at_once(rank))


def mend_thrice(agent: FakeAgent) -> None:
    mend(agent, "once", times=3)


def test_a_connection_may_break_again_while_it_is_mended() -> None:
    assert run_world(hang_once, scenario=mend_thrice) == EXPECTED_AFTER_HANGING["several at once"]


def make_a_group(rank: int) -> Any:
    be_held_up(rank, "group")
    x = ours(rank)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    return plain(x)


def mend_while_a_group_is_made(agent: FakeAgent) -> None:
    mend(agent, "group")


def test_a_rank_that_waits_in_new_group_when_the_connection_breaks_gets_its_group() -> None:
    found = run_world(make_a_group, scenario=mend_while_a_group_is_made, limit_s=8.0)

    assert found == [[FLOAT, SUMS]] * 2


def be_left_alone(rank: int) -> Any:
    """Rank 1 closes its connection and no recovery comes: rank 0 must get the error, as under torchrun."""
    from ttprun.rank import journal

    journal.PATIENCE_S = 0.5
    x = ours(rank)
    dist.all_reduce(x)
    if rank == 1:
        group: Any = dist.group.WORLD
        group.cut()
        return "cut"
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_without_a_recovery_the_script_gets_the_backends_error() -> None:
    assert run_world(be_left_alone) == ["RuntimeError", "cut"]


# Errors, and what is kept.


def misuse(rank: int) -> list[Any]:
    from ttprun.rank import journal

    journal.PATIENCE_S = 0.3
    session = current()
    held = (lambda: None) if session is None else lambda: (len(session.journal.entries), session.journal.held_bytes)
    mistakes: dict[str, Callable[[], Any]] = {
        "layout": lambda: dist.all_reduce(torch.eye(2).to_mkldnn()),
        "number": lambda: dist.all_gather([torch.zeros(3)], ours(rank)),
        "size": lambda: dist.all_gather_into_tensor(torch.zeros(5), ours(rank)),
        "type": lambda: dist.all_gather([torch.zeros(3).int()] * 2, ours(rank)),
        "not a tensor": lambda: dist.all_reduce([1, 2]),  # type: ignore[arg-type]
        "root": lambda: dist.broadcast(ours(rank), 5),
        "splits": lambda: dist.all_to_all_single(torch.zeros(4), ours(rank, 4), [1, 1], [1, 1]),
    }
    found: list[Any] = []
    for name, mistake in mistakes.items():
        before = held()
        try:
            mistake()
            found.append((name, "no error", held() == before))
        except Exception as error:
            found.append((name, type(error).__name__, held() == before))
    x = ours(rank)
    dist.all_reduce(x)
    return [found, x.tolist()]


HABITS: dict[str, Callable[[int], Any]] = {}


def habit(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """One of the things that are tried in one world, one after the other."""
    HABITS[function.__name__] = function
    return function


def what_is_held(rank: int, shapes: int = 1) -> dict[str, Any]:
    """Sixty steps with one operation each, and what the hooks still hold in the end."""
    session = current()
    assert session is not None
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gone = []
    for step in range(60):
        x = torch.zeros(1000 + step % shapes)
        gone.append(weakref.ref(x))
        dist.all_reduce(x)
        weight.grad = torch.ones(2)
        optimizer.step()
    del x
    journal = session.journal
    return {
        "tensors alive": sum(ref() is not None for ref in gone),
        "entries": len(journal.entries),
        "copies": sum(len(spare) for spare in journal._spare.values()) + sum(len(e.saved) for e in journal.entries),
        "results": sum(len(kept) for kept in session.results._of_step.values()),
    }


@habit
def sixty_steps(rank: int) -> Any:
    return what_is_held(rank)


@habit
def sixty_shapes(rank: int) -> Any:
    return what_is_held(rank, shapes=60)


@habit
def keep_a_work(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    return plain([work.is_completed(), work.result(), work.get_future().wait()])


@habit
def wrong_calls(rank: int) -> Any:
    return misuse(rank)


def evaluate_for_ever(rank: int) -> dict[str, Any]:
    """Gathers of 240 KB each, without a step, against a journal of 64 MiB."""
    session = current()
    assert session is not None
    gone = []
    for _ in range(300):
        parts = [torch.zeros(20_000) for _ in range(2)]
        dist.all_gather(parts, torch.zeros(20_000))
        gone.append(weakref.ref(parts[0]))
    held = len(session.journal.entries)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    del parts
    return {
        "held": held,
        "unprotected": session.unprotected,
        "alive after a step": sum(ref() is not None for ref in gone),
    }


def try_habits(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for name, function in HABITS.items():
        try:
            found[name] = function(rank)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def habits() -> dict[str, Any]:
    """What rank 0 has seen."""
    found: dict[str, Any] = run_world(try_habits)[0]
    return found


def test_a_wrong_call_raises_what_gloo_raises_and_leaves_nothing_in_the_journal(habits: dict[str, Any]) -> None:
    gloo = run_world(misuse, is_managed=False)

    assert habits["wrong_calls"] == gloo[0]


def test_a_protected_rank_holds_one_step(habits: dict[str, Any]) -> None:
    found = habits["sixty_steps"]

    assert found["entries"] <= 1
    assert found["copies"] <= 2
    assert found["results"] <= 2
    assert found["tensors alive"] <= 1


def test_copies_of_tensors_of_ever_new_shapes_do_not_pile_up(habits: dict[str, Any]) -> None:
    assert habits["sixty_shapes"]["copies"] <= 2 * 16  # those that no step has used for a while are given up


def test_a_work_still_gives_its_result_after_the_step(habits: dict[str, Any]) -> None:
    assert habits["keep_a_work"] == [True, [[FLOAT, SUMS]], [[FLOAT, SUMS]]]


def test_a_script_that_takes_no_step_does_not_fill_the_memory_with_its_results() -> None:
    """The journal's limit counts inputs and outputs: those of a gather are as many times larger as there are ranks."""
    (found, _) = run_world(evaluate_for_ever)

    assert found["held"] <= (64 << 20) / 240_000
    assert "journal_limit_mib" in found["unprotected"]
    assert found["alive after a step"] == 0


def hold_without_protection(rank: int) -> dict[str, Any]:
    session = current()
    assert session is not None
    session.give_up_protection("the test says so")
    return what_is_held(rank)


def test_a_rank_that_is_no_longer_protected_holds_nothing_for_a_recovery() -> None:
    (found, _) = run_world(hold_without_protection)

    assert max(found.values()) <= 2, found


def test_a_rank_alone_in_its_world_holds_nothing_for_a_recovery() -> None:
    (found,) = run_world(what_is_held, size=1)

    assert max(found.values()) <= 2, found


def destroy_and_begin_again(rank: int, place: str) -> Any:
    from ttprun.rank import journal

    journal.PATIENCE_S = 0.5
    group = dist.new_group([0, 1])
    x = ours(rank)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    session = current()
    left = None if session is None else len(session.groups)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    y = ours(rank)
    dist.all_reduce(y)
    return plain([x, y, left, isinstance(dist.group.WORLD, ManagedGroup)])


def test_a_script_may_destroy_its_groups_and_begin_again(tmp_path: Any) -> None:
    found = run_world(destroy_and_begin_again, str(tmp_path / "again"), limit_s=8.0)

    assert found == [[[FLOAT, SUMS], [FLOAT, SUMS], 0, True]] * 2
