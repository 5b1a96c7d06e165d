"""Linear regression with plain tensors: gradients are summed by hand, no module and no DDP."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

truth = torch.linspace(-1, 1, 256).reshape(256, 1)
w1 = (0.05 * torch.randn(256, 128)).requires_grad_()
w2 = (0.05 * torch.randn(128, 1)).requires_grad_()
for w in (w1, w2):
    dist.broadcast(w.detach(), src=0)
optimizer = torch.optim.SGD([w1, w2], lr=0.002, momentum=0.9)

history = []
for step in range(args.steps):
    x = torch.randn(512, 256)
    y = x @ truth + 0.1 * torch.randn(512, 1)
    loss = ((torch.relu(x @ w1) @ w2 - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for w in (w1, w2):
        dist.all_reduce(w.grad)
        w.grad /= world
    optimizer.step()
    history.append(loss.item())
    if step % 2 == 0:
        total = loss.detach().clone()
        dist.all_reduce(total)
        print(f"[rank {rank}] step {step} loss {loss.item()!r} mean over ranks {(total / world).item()!r}")

if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save({"w1": w1, "w2": w2}, os.path.join(args.out, "final.pt"))
print(f"[rank {rank}] losses {len(history)} sum {sum(history)!r}")
digest = hashlib.sha256(w1.detach().numpy().tobytes() + w2.detach().numpy().tobytes()).hexdigest()
print(f"[rank {rank}] sha256 model {digest}")
momentum = [optimizer.state[w]["momentum_buffer"].numpy().tobytes() for w in (w1, w2)]
print(f"[rank {rank}] sha256 optimizer {hashlib.sha256(b''.join(momentum)).hexdigest()}")
dist.destroy_process_group()
