"""What megatron_like.py trains: a GPT cut over tensor-parallel ranks, and an optimizer whose state is kept twice.

The optimizer's state is one flat piece of float32 (weights, and Adam's two averages). A data-parallel group is cut in
two halves; inside each half the piece is cut into shards, one a rank. So rank i of the first half holds what rank i of
the second holds: that is the copy from which a lost rank is repaired.

With pipeline stages, each holds its layers, and a batch goes through them in two parts (Megatron's 1F1B): activations
to the next stage, gradients back.

If ranks leave, the others compute their parts of each batch too, and add the gradients of all parts. With two
data-parallel ranks, one of which leaves, this is exactly the sum of an all-reduce of two: no bit differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CONTEXT, LAYERS = 64, 32, 4, 16, 2
REPLICAS = 2
BATCH, PARTS_OF_A_BATCH = 4, 2  # of several stages: each works on one part while its neighbours do on others


class _SumOfGradients(torch.autograd.Function):
    """Behind it each tensor-parallel rank computes its own part: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOfParts(torch.autograd.Function):
    """The sum of what the tensor-parallel ranks have computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Layers:
    """Where this rank stands in its world: tensor-parallel neighbours are next to each other, stages farthest apart.

    half, shard    ranks in one half of the data-parallel group, and this rank's place in its half
    parts          of each batch that this rank computes; its own place in the data-parallel group, if all are there
    first_holders  for each shard, the first place in the data-parallel group that is there and holds it
    world_group    of all that are there, if some are not
    """

    def __init__(self, rank: int, world: int, tensor_parallel: int, dropout: float, pipeline_parallel: int = 1) -> None:
        self.dropout = dropout
        self.rank, self.world, self.tp, self.pp = rank, world, tensor_parallel, pipeline_parallel
        self.of_stage = world // pipeline_parallel
        self.stage, self.dp = rank // self.of_stage, self.of_stage // tensor_parallel
        self.tp_rank, self.dp_rank = rank % tensor_parallel, rank % self.of_stage // tensor_parallel
        self.dp_ranks = next(ranks for ranks in self.all_dp_ranks() if rank in ranks)
        self.half = self.dp // REPLICAS
        self.shard = self.dp_rank % self.half
        self.tp_group = self.dp_group = self.half_group = self.whole_dp_group = self.pp_group = None
        self.world_ranks = list(range(world))

    @property
    def is_first(self) -> bool:
        """This rank does what only one has to do."""
        return self.rank == self.world_ranks[0]

    @property
    def is_last_stage(self) -> bool:
        """This rank has the loss."""
        return self.stage == self.pp - 1

    def all_dp_ranks(self) -> list[list[int]]:
        """The ranks of each data-parallel group of the world."""
        firsts = (stage + at for stage in range(0, self.world, self.of_stage) for at in range(self.tp))
        return [list(range(at, at // self.of_stage * self.of_stage + self.of_stage, self.tp)) for at in firsts]

    def kept_groups(self) -> list[Any]:
        """All groups of this rank that a rebuild keeps, and connects anew."""
        return [dist.group.WORLD, *filter(None, (self.tp_group, self.whole_dp_group, self.pp_group))]

    def make_groups(self) -> None:
        """Every rank makes every group, in the same order."""
        for at in range(0, self.world, self.tp):
            ranks = list(range(at, at + self.tp))
            group = dist.new_group(ranks)
            self.tp_group = group if self.rank in ranks else self.tp_group
        for ranks in self.all_dp_ranks():
            group = dist.new_group(ranks)
            self.whole_dp_group = group if self.rank in ranks else self.whole_dp_group
        for at in range(self.of_stage if self.pp > 1 else 0):
            ranks = list(range(at, self.world, self.of_stage))
            group = dist.new_group(ranks)
            self.pp_group = group if self.rank in ranks else self.pp_group
        self.be_whole()

    def be_whole(self) -> None:
        """All ranks are there."""
        self.world_ranks, self.world_group, self.dp_group = list(range(self.world)), None, self.whole_dp_group
        self.parts, self.first_holders = [self.dp_rank], list(range(self.half))
        self.renew()
        self.gathered = list(range(self.half))

    def shrink(self, dp_ranks: list[int], world_ranks: list[int]) -> None:
        """Only these are there: they share the parts of the others, and gather each shard from who holds it."""
        self.world_ranks = world_ranks
        self.world_group = dist.new_group(world_ranks, use_local_synchronization=True)
        self.dp_group = self.gather_group = dist.new_group(dp_ranks, use_local_synchronization=True)
        present = [self.dp_ranks.index(rank) for rank in dp_ranks]
        absent = [part for part in range(self.dp) if part not in present]
        self.parts = sorted([self.dp_rank, *absent[present.index(self.dp_rank) :: len(present)]])
        self.first_holders = [next(at for at in present if at % self.half == shard) for shard in range(self.half)]
        self.gathered = [present.index(at) for at in self.first_holders]

    def renew(self) -> None:
        """Make the groups that the optimizer holds: a rebuild makes them anew."""
        for ranks in self.all_dp_ranks():
            for part in (ranks[: self.half], ranks[self.half :]):
                group = dist.new_group(part)
                self.half_group = group if self.rank in part else self.half_group
        self.gather_group = self.half_group


class Block(nn.Module):
    """Attention and a perceptron; a rank holds its heads, and its part of the perceptron's width."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers, self.heads = layers, HEADS // layers.tp
        part = WIDTH // layers.tp
        self.before_attention, self.before_perceptron = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * part, bias=False)
        self.out = nn.Linear(part, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, 4 * part, bias=False)
        self.narrow = nn.Linear(4 * part, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        group = self.layers.tp_group
        split = self.query_key_value(_SumOfGradients.apply(self.before_attention(x), group))
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in split.chunk(3, dim=2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = _SumOfParts.apply(self.out(seen.transpose(1, 2).flatten(2)), group)
        x = x + functional.dropout(seen, self.layers.dropout, self.training)
        wide = functional.gelu(self.widen(_SumOfGradients.apply(self.before_perceptron(x), group)))
        return x + functional.dropout(_SumOfParts.apply(self.narrow(wide), group), self.layers.dropout, self.training)


class Gpt(nn.Module):
    """One stage, made from one seed for what all tensor-parallel ranks hold alike, and one for each rank's own part."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.stage == 0, layers.is_last_stage
        if self.is_first:
            self.token = nn.Embedding(VOCABULARY, WIDTH)
            self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(layers) for _ in range(LAYERS // layers.pp))
        if self.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        alike = torch.Generator().manual_seed(7 + layers.stage)
        own = torch.Generator().manual_seed(100 + layers.tp_rank + layers.tp * layers.stage)
        for name, parameter in self.named_parameters():
            is_part = any(part in name for part in ("query_key_value", "out.", "widen", "narrow"))
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05, generator=own if is_part else alike)

    def forward(self, tokens: Tensor, x: Tensor | None = None) -> Tensor:
        """The loss, or what the next stage works on; x is what the stage before has sent."""
        if x is None:
            x = self.token(tokens[:, :-1]) + self.place.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten()) if self.is_last else x


class Pipeline:
    """One forward and one backward pass of a batch through all stages, one of each in turn (1F1B)."""

    def __init__(self, model: Gpt, layers: Layers) -> None:
        self.model, self.layers = model, layers

    def run(self, tokens: Tensor) -> Tensor | None:
        """Compute the gradients of this rank's stage; the mean loss in the last stage."""
        if self.layers.pp == 1:
            loss = self.model(tokens)
            loss.backward()
            return loss.detach()
        parts = list(tokens.chunk(PARTS_OF_A_BATCH))
        ahead = min(self.layers.pp - self.layers.stage - 1, len(parts))
        self._under_way: list[tuple[Tensor | None, Tensor]] = []
        self._losses: list[Tensor] = []
        try:
            self._run(parts, ahead)
        finally:
            self._under_way.clear()  # activations: a repair asks what still holds memory that has failed
        return sum(self._losses) if self._losses else None  # type: ignore[return-value]

    def _run(self, parts: list[Tensor], ahead: int) -> None:
        for part in parts[:ahead]:
            x = self._exchange(from_before=True)
            self._exchange(to_next=self._forward(part, x))
        x = self._exchange(from_before=True) if len(parts) > ahead else None
        for part in parts[ahead:]:
            gradient = self._exchange(to_next=self._forward(part, x), from_next=True)
            x = self._exchange(to_before=self._backward(gradient), from_before=part is not parts[-1])
        for _ in range(ahead):
            self._exchange(to_before=self._backward(self._exchange(from_next=True)))

    def _forward(self, part: Tensor, x: Tensor | None) -> Tensor:
        x = x if x is None else x.requires_grad_()
        output = self.model(part, x)
        if self.model.is_last:
            output = output / PARTS_OF_A_BATCH
            self._losses.append(output.detach())
        self._under_way.append((x, output))
        return output.detach()

    def _backward(self, gradient: Tensor | None) -> Tensor | None:
        x, output = self._under_way.pop(0)
        torch.autograd.backward(output, gradient)
        return None if x is None else x.grad

    def _exchange(
        self,
        to_next: Tensor | None = None,
        from_next: bool = False,
        to_before: Tensor | None = None,
        from_before: bool = False,
    ) -> Tensor | None:
        """Messages of both directions, started together; what was received. There is none beyond the ends."""
        layers, made, messages = self.layers, None, []
        device = next(self.model.parameters()).device
        sizes = (BATCH // PARTS_OF_A_BATCH, CONTEXT, WIDTH)

        def add(operation: Callable[..., Any], tensor: Tensor, at: int) -> None:
            messages.append(
                dist.P2POp(operation, tensor.contiguous(), layers.rank + at * layers.of_stage, layers.pp_group)
            )

        if to_next is not None and not self.model.is_last:
            add(dist.isend, to_next, 1)
        if to_before is not None and not self.model.is_first:
            add(dist.isend, to_before, -1)
        for is_wanted, is_at_end, at in ((from_next, self.model.is_last, 1), (from_before, self.model.is_first, -1)):
            if is_wanted and not is_at_end:
                made = torch.empty(sizes, device=device)
                add(dist.irecv, made, at)
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return made


class Schedule:
    """Learning rate by step: up in ten steps, then down along a cosine."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step = steps, 0

    @property
    def rate(self) -> float:
        """Of the step that comes next."""
        up = min(1.0, (self.step + 1) / 10)
        return 3e-3 * up * 0.5 * (1 + math.cos(math.pi * self.step / max(self.steps, 1)))


class Optimizer:
    """Adam on one shard of the flat weights.

    main, exp_avg, exp_avg_sq   [n] float32, n the same in all ranks of a data-parallel group
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.parameters, self.layers = list(model.parameters()), layers
        flat = nn.utils.parameters_to_vector(self.parameters).detach()
        self.length = flat.numel()
        self.size = math.ceil(self.length / layers.half)
        padded = functional.pad(flat, (0, self.size * layers.half - self.length))
        self.main = padded[layers.shard * self.size :][: self.size].clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.main), torch.zeros_like(self.main)

    def tensors(self) -> list[Tensor]:
        """All that is kept: what a repair sends, and a checkpoint holds."""
        return [self.main, self.exp_avg, self.exp_avg_sq]

    def flat_gradients(self) -> Tensor:
        """The gradients of the part that was computed last."""
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])

    def reduce_gradients(self, of_parts: list[Tensor]) -> Tensor:
        """Mean over all parts of the batch of this rank's shard of the gradients; given those that it has computed."""
        flat = of_parts[0]
        for other in of_parts[1:]:
            flat = flat + other
        dist.all_reduce(flat, group=self.layers.dp_group)
        padded = functional.pad(flat / self.layers.dp, (0, self.size * self.layers.half - self.length))
        return padded[self.layers.shard * self.size :][: self.size]

    def update(self, gradient: Tensor, rate: float, step: int) -> None:
        """One step of Adam, number `step` from 1 on: nothing else changes what is kept."""
        self.exp_avg.lerp_(gradient, 0.1)
        self.exp_avg_sq.lerp_(gradient * gradient, 0.05)
        mean, square = self.exp_avg / (1 - 0.9**step), self.exp_avg_sq / (1 - 0.95**step)
        self.main.sub_(rate * mean / (square.sqrt() + 1e-8))

    def gather_weights(self) -> None:
        """Write the weights of the model from the shards of this rank's half, or of all that are there."""
        group = self.layers.gather_group
        gathered = [torch.empty_like(self.main) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, self.main, group=group)
        shards = [gathered[at] for at in self.layers.gathered]
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.cat(shards)[: self.length], self.parameters)


def batch_of(iteration: int, part: int, size: int = BATCH) -> Tensor:
    """Tokens of one iteration; tensor-parallel ranks read the same."""
    generator = torch.Generator().manual_seed(10_000 * iteration + part)
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    return (start + torch.arange(CONTEXT + 1)) % VOCABULARY
