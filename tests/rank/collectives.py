"""Every collective as scripts call it: functions of a rank, that run in a world of two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

FLOAT = "torch.float32"
SUMS = [30.0, 32.0, 34.0]  # of `ours` of both ranks


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


def gather_single(rank: int) -> Any:
    whole = torch.zeros(6)
    if hasattr(dist, "gather_single"):  # from torch 2.15 on
        dist.gather_single(ours(rank), whole if rank == 0 else None, dst=0)
    return whole


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


def what_ddp_logs(rank: int) -> Any:
    logged = DistributedDataParallel(torch.nn.Linear(3, 1))._get_ddp_logging_data()
    return [logged["backend_name"], logged["world_size"]]


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
    "gather_single": gather_single,
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
    "what DDP logs": what_ddp_logs,
    "sparse embedding": sparse_embedding,
    "send and receive": send_and_receive,
    "batched send and receive": batched_send_and_receive,
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
