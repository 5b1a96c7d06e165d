"""A pipeline of two stages by send and recv, twice over: four ranks. Nothing here knows of a launcher.

The ranks 0 and 2 hold the first stage, 1 and 3 the second one. With `--how` the messages are sent by blocking calls, by
handles that are waited for later, in batches, or each after its size.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn

args = arguments(steps=16, microbatches=3, width=16, how=["blocking", "async", "batched", "sized"])

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pipes = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
stages = [dist.new_group(list(range(stage, world, 2))) for stage in range(2)]
replica, stage = divmod(rank, 2)
pipe, peers, other = pipes[replica], stages[stage], rank ^ 1

torch.manual_seed(100 + stage)
if stage == 0:
    model = nn.Sequential(nn.Linear(8, args.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(args.width, args.width))
else:
    model = nn.Sequential(nn.LayerNorm(args.width), nn.Tanh(), nn.Linear(args.width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
batches = torch.Generator().manual_seed(10 + replica)  # both stages of a pipeline draw the same
pending = []


def send(tensor, tag):
    if args.how == "async":
        pending.append((dist.isend(tensor, other, group=pipe, tag=tag), tensor))
    elif args.how == "batched":
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, other, group=pipe, tag=tag)])
        pending.extend((work, tensor) for work in works)
    elif args.how == "sized":
        dist.send_object_list([list(tensor.shape)], other, group=pipe)
        dist.send(tensor, other, group=pipe, tag=tag)
    else:
        dist.send(tensor, other, group=pipe, tag=tag)


def receive(shape, tag):
    if args.how == "sized":
        known = [None]
        dist.recv_object_list(known, other, group=pipe)
        shape = known[0]
    tensor = torch.empty(shape)
    if args.how == "async":
        dist.irecv(tensor, other, group=pipe, tag=tag).wait()
    elif args.how == "batched":
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, other, group=pipe, tag=tag)]):
            work.wait()
    else:
        dist.recv(tensor, other, group=pipe, tag=tag)
    return tensor


losses = []
for step in range(args.steps):
    x = torch.randn(args.microbatches, 4, 8, generator=batches)
    optimizer.zero_grad()
    if stage == 0:
        outputs = []
        for number in range(args.microbatches):
            outputs.append(model(x[number]))
            send(outputs[-1].detach(), number)
        for number, output in enumerate(outputs):
            output.backward(receive(output.shape, 10 + number))
    else:
        activations, kept = [], []
        for number in range(args.microbatches):
            activations.append(receive((4, args.width), number).requires_grad_())
            error = model(activations[-1]) - x[number].sum(1, keepdim=True).sin()
            kept.append((error**2).mean() / args.microbatches)
        for number, loss in enumerate(kept):
            loss.backward()
            send(activations[number].grad, 10 + number)
        losses.append(sum(loss.item() for loss in kept))
    for work, _ in pending:
        work.wait()
    pending.clear()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=peers)
        parameter.grad /= peers.size()
    optimizer.step()
    scheduler.step()
    print(f"[rank {rank}] step {step + 1} loss {losses[-1] if losses else None!r}", flush=True)

weights = b"".join(weight.detach().numpy().tobytes() for weight in model.state_dict().values())
print(f"[rank {rank}] losses {len(losses)} sum {sum(losses)!r}")
print(f"[rank {rank}] sha256 model {hashlib.sha256(weights).hexdigest()}")
if rank == 1:
    os.makedirs(args.out, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.out, "final.pt"))
dist.destroy_process_group()
