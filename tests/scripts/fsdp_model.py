"""FSDP2: blocks and root are sharded over the ranks, as a tutorial would write it. Nothing here knows of a launcher."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from around_the_loop import arguments, finish
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    """Attention over a sequence, and a small network behind it."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.network(self.norm2(x)))


class Model(nn.Module):
    """Embedding, blocks, head. The rows of no layer divide by three."""

    def __init__(self, words, width, blocks, dropout):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, words)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, tokens):
        self.seen += tokens.numel()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model, mesh):
    """The model, each of its blocks gathered by itself."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full_weights(model):
    """All weights as they are without sharding."""
    return {name: weight.full_tensor() for name, weight in model.state_dict().items() if isinstance(weight, DTensor)}


# gate: file that all wait for in step 12, before the backward pass
args = arguments(samples=72, epochs=3, replicas=1, gate="")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (args.replicas, world // args.replicas), mesh_dim_names=("replica", "shard"))
mesh = mesh["shard"] if args.replicas == 1 else mesh
model = sharded(Model(words=50, width=32, blocks=2, dropout=0.1), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
tokens = torch.randint(0, 50, (args.samples, 9), generator=torch.Generator().manual_seed(2))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:], torch.arange(args.samples))
sampler = DistributedSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
torch.manual_seed(10 + rank)  # dropout differs
steps, trained = 0, 0

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets, samples in loader:
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        while steps == 11 and args.gate and not os.path.exists(args.gate):
            time.sleep(0.02)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = float(norm.full_tensor())
        optimizer.step()
        schedule.step()
        steps += 1
        trained += len(inputs)
        line = f"loss {loss.item():.9f} norm {clipped:.9f} samples {samples.tolist()}"
        print(f"[rank {rank}] epoch {epoch} step {steps} {line}", flush=True)
    model.eval()
    with torch.no_grad():
        score = model(tokens[:8, :-1]).argmax(-1).eq(tokens[:8, 1:]).float().mean()
    model.train()
    total = torch.tensor(trained)
    dist.all_reduce(total)
    print(f"[rank {rank}] epoch {epoch} is over: {int(total)} trained, score {float(score):.4f}", flush=True)

weights = full_weights(model)
print(f"[rank {rank}] seen {int(model.seen)} lr {schedule.get_last_lr()[0]:.9f}")
finish(weights.values(), args.out, weights)
