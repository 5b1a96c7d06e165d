"""Context parallelism: each rank holds a part of every sequence, and keys and values travel around a ring of ranks.

The model is the same in all ranks, and its gradients are reduced over all. With `--replicas 2` of 4 ranks there are two
rings, with other sequences. A step is made of two micro-batches; between them the model is evaluated. (torch's own
`context_parallel` has no attention for processors: torch 2.13 raises NotImplementedError.) With `--backend` of a device
all is there; with `--coalesce` messages and reductions are started together by torch's `_coalescing_manager`.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn import functional

HEADS, WIDTH, LENGTH, WORDS = 2, 16, 32, 24


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of its own part and of those before it."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, held = group, torch.stack([k, v])
        result, total = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for source, held in around(held, group):
            scores = scores_of(q, held[0], source, group)
            logsum = scores.logsumexp(-1)
            both = torch.logaddexp(total, logsum)
            part = (scores - both[..., None]).exp() @ held[1]
            result = result * (total - both).exp()[..., None] + part
            total = both
        ctx.save_for_backward(q, k, v, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, result, total = ctx.saved_tensors
        delta = (grad * result).sum(-1, keepdim=True)
        of_q = torch.zeros_like(q)
        held = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        for source, held in around(held, ctx.group):
            odds = (scores_of(q, held[0], source, ctx.group) - total[..., None]).exp()
            of_scores = odds * (grad @ held[1].mT - delta) / q.shape[-1] ** 0.5
            of_q += of_scores @ held[0]
            held[2] += of_scores.mT @ q
            held[3] += odds.mT @ grad
        of_k, of_v = passed_on(held[2:], ctx.group)  # home again
        return of_q, of_k, of_v, None


def around(held: torch.Tensor, group: Any) -> Any:
    """Whose part this rank has, and the part: its own first, then that of the rank before it, and so on."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for turn in range(ranks):
        yield (rank - turn) % ranks, held
        if turn < ranks - 1:
            held = passed_on(held, group)


def passed_on(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """To the next rank of the ring; returns what the one before has sent."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    if args.coalesce:
        with dist._coalescing_manager(group, device, async_ops=True) as together:
            dist.isend(tensor.contiguous(), group=group, group_dst=after)
            dist.irecv(received, group=group, group_src=before)
        together.wait()
        return received
    orders = [
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=after),
        dist.P2POp(dist.irecv, received, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(orders):
        work.wait()
    return received


def scores_of(q: torch.Tensor, k: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    """Scaled products of this rank's queries with the keys of a part; keys of later tokens count for nothing."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    place = torch.arange(q.shape[-2], device=device)
    later = place[None] + source * len(place) > place[:, None] + dist.get_rank(group) * len(place)
    return scores.masked_fill(later, -1e9)


class Block(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = RingAttention.apply(q, k, v, self.group)
        return x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(group), Block(group))
        self.leave = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(self.words(words) + self.places(places)))


def loss_of(model: Model, start: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sequences that begin so. start [n, 1] words, places those of this rank's part."""
    whole = (start.to(device) + torch.arange(LENGTH + 1, device=device) ** 2) % WORDS
    return functional.cross_entropy(model(whole[:, places], places).flatten(0, 1), whole[:, places + 1].flatten())


args = arguments(steps=20, replicas=1, backend="gloo", coalesce=False)

device = torch.device("cpu")
if args.backend != "gloo":
    torch.use_deterministic_algorithms(True)
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
dist.init_process_group(args.backend)
rank, world = dist.get_rank(), dist.get_world_size()
parts = world // args.replicas
rings = [dist.new_group(range(first, first + parts)) for first in range(0, world, parts)]
ring, part = divmod(rank, parts)

torch.manual_seed(0)
model = Model(rings[ring]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
places = torch.arange(LENGTH, device=device).chunk(parts)[part]
sequences = torch.Generator().manual_seed(10 + ring)  # all ranks of a ring draw the same

torch.manual_seed(1000 + rank)  # another dropout in each rank
for step in range(args.steps):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(2):
        if micro == 1:
            model.eval()
            with torch.no_grad():
                evaluated = loss_of(model, torch.arange(4)[:, None], places).item()
            model.train()
        loss = loss_of(model, torch.randint(WORDS, (4, 1), generator=sequences), places) / 2
        loss.backward()
        total += loss.item()
    if args.coalesce:
        with dist._coalescing_manager(None, device):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        if not args.coalesce:
            dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {total!r} before {evaluated!r}", flush=True)

finish(model.parameters(), args.out, {name: value.cpu() for name, value in model.state_dict().items()})
