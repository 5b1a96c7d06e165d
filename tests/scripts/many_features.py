"""What torch.distributed offers beside plain DistributedDataParallel, one by one; each prints what comes of it."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from around_the_loop import arguments
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

args = arguments()

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = (model(torch.randn(16, 8)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def tell(what, result):
    print(f"[rank {rank}] {what}: {result!r}", flush=True)


for options in ({"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
    tell(f"DDP with {options}", train(DistributedDataParallel(network(), **options), 3))

plain = DistributedDataParallel(network())
os.makedirs(args.out, exist_ok=True)
dcp.async_save({"model": plain.module.state_dict()}, checkpoint_id=os.path.join(args.out, "dcp")).result()
state = {"model": network().state_dict()}
dcp.load(state, checkpoint_id=os.path.join(args.out, "dcp"))
tell("DCP", all(torch.equal(value, state["model"][name]) for name, value in plain.module.state_dict().items()))

objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
tell("objects", objects)
tell("functional", functional.all_reduce(torch.ones(2) * rank, "sum", dist.group.WORLD).tolist())
one, other = torch.ones(2) * rank, torch.ones(3)
with dist._coalescing_manager():
    dist.all_reduce(one)
    dist.all_reduce(other)
tell("coalesced", one.tolist() + other.tolist())

tell("FSDP", train(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), 3))
with plain.join():
    tell("join", train(plain, 3 + rank))
received = torch.zeros(2)
neighbours = (rank + 1) % world, (rank - 1) % world
sends = dist.P2POp(dist.isend, torch.ones(2) * rank, neighbours[0])
for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, neighbours[1])]):
    work.wait()
tell("point to point", received.tolist())
dist.barrier()
dist.destroy_process_group()
