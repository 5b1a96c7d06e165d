"""Two ranks that train with `--what` few scripts use, mostly of torch.distributed. Nothing here knows of a launcher."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

args = arguments(steps=16, what="plain")
what = args.what


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
if what == "subgroups":
    own, _ = dist.new_subgroups(1)
    named, _ = dist.new_subgroups_by_enumeration([list(range(world))])
    local = dist.new_group(list(range(world)), use_local_synchronization=True)
batches = torch.Generator().manual_seed(rank)
torch.manual_seed(50 + rank)
flat = torch.zeros(32)
handle = kept = None
offset = 0.0

for step in range(args.steps):
    x = torch.randn(4, 8, generator=batches)
    if handle is not None:  # of the step before
        handle.wait()
        offset = kept.mean().item()
    if what == "objects":
        word = [{"step": step, "word": "x" * (step + 1)} if rank == 0 else None]
        dist.broadcast_object_list(word, 0)
        everyone = [None] * world
        dist.all_gather_object(everyone, {"rank": rank, "seen": word[0]["word"]})
        mine = [None]
        dist.scatter_object_list(mine, [(one, step) for one in range(world)] if rank == 0 else None, 0)
        offset = 0.01 * (len(everyone[1]["seen"]) + mine[0][1])
    elif what == "subgroups":
        said = [None] * world
        dist.all_gather_object(said, (rank, step), group=local)
        sizes = [[1, 2], [3, 1]]
        given, taken = torch.arange(float(sum(sizes[rank]))), torch.empty(sum(row[rank] for row in sizes))
        dist.all_to_all_single(taken, given, [row[rank] for row in sizes], sizes[rank], group=named)
        alone = functional.all_reduce(x.mean(), "sum", own)
        gathered = functional.all_gather_tensor(x.mean(0), 0, named)
        dist.monitored_barrier(group=local)
        offset = 0.01 * (said[1][1] + taken.sum().item() + alone.item() + gathered.sum().item())
    elif what == "coalesced":
        first, second = x.mean(0), x.sum(1)
        with dist._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)
        before = flat.sum().item()
        flat.copy_(x.flatten())
        own = flat.chunk(world)[rank]  # in place, in the same memory in each step
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(own, flat)
        offset = first.sum().item() * 0.01 + second.sum().item() * 0.001 + before * 1e-4
    loss = ((ddp(x) - x.sum(1, keepdim=True).sin() + offset) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    if what == "async_over_step":
        kept = x.mean(0)
        handle = dist.all_reduce(kept, async_op=True)
    optimizer.step()
    print(f"[rank {rank}] step {step + 1} loss {loss.item()!r}", flush=True)

finish(model.parameters(), args.out, model.state_dict())
