"""A pipeline of two stages on an accelerator, times data parallelism, messages by hand. Knows of no launcher.

With `--together` all messages go by batch_isend_irecv; `--device-id` names the device when the group is made.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from around_the_loop import arguments

args = arguments(backend="hccl", steps=12, together=False, device_id=False)

torch.use_deterministic_algorithms(True)
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
dist.init_process_group(args.backend, device_id=device if args.device_id else None)
rank, world = dist.get_rank(), dist.get_world_size()
stage, pipeline = rank % 2, rank // 2
other = rank + 1 - 2 * stage
replicas = [dist.new_group(list(range(place, world, 2))) for place in range(2)][stage]

torch.manual_seed(stage)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(args.steps, 4, 8, 16, generator=torch.Generator().manual_seed(10 + pipeline))


def exchange(*messages):
    """Each is (send or receive, tensor)."""
    if args.together:
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, other) for op, tensor in messages])
    elif len(messages) == 1:
        ((op, tensor),) = messages
        (dist.send if op is dist.isend else dist.recv)(tensor, other)
        return
    else:
        works = [op(tensor, other) for op, tensor in messages]
    for work in works:
        work.wait()


def first_stage(parts):
    """Forward two micro-batches ahead of the gradients that come back; 0 in the place of a loss."""
    outputs = [model(part) for part in parts[:1]]
    exchange((dist.isend, outputs[0].detach()))
    for number in range(len(parts)):
        gradient = torch.empty_like(outputs[number])
        if number + 1 < len(parts):
            outputs.append(model(parts[number + 1]))
            exchange((dist.isend, outputs[-1].detach()), (dist.irecv, gradient))
        else:
            exchange((dist.irecv, gradient))
        outputs[number].backward(gradient)
    return 0.0


def last_stage(parts):
    """Returns the loss."""
    total = torch.zeros((), device=device)
    given = torch.empty_like(parts[0])
    exchange((dist.irecv, given))
    for number, part in enumerate(parts):
        taken = given.clone().requires_grad_()
        loss = (model(taken) - part.sin()).square().mean()
        loss.backward()
        total += loss.detach()
        if number + 1 < len(parts):
            exchange((dist.irecv, given), (dist.isend, taken.grad))
        else:
            exchange((dist.isend, taken.grad))
    return total.item()


for step, batch in enumerate(data):
    optimizer.zero_grad()
    loss = (last_stage if stage else first_stage)(batch.to(device))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= replicas.size()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss!r}", flush=True)

state = {name: value.cpu() for name, value in model.state_dict().items()}
if pipeline == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(state, os.path.join(args.out, "final.pt" if stage else "first.pt"))
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
print(f"[rank {rank}] sha256 model {digest}")
dist.destroy_process_group()
