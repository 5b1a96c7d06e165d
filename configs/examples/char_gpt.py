"""Train a small character-level GPT on the source of Python's standard library.

    torchrun --nproc-per-node 3 char_gpt.py --steps 150 --out weights.pt

Everything is seeded: two runs with the same arguments and the same number of ranks end with the same weights.
Begin with main().
"""

import argparse
import hashlib
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def read_corpus(limit: int) -> str:
    """The standard library's top-level modules, in the order of their names, up to `limit` characters."""
    parts: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        length += len(text)
    return "".join(parts)[:limit]


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        h = self.dropout(self.characters(x) + self.positions(positions))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def sha256_of(state: dict[str, Tensor]) -> str:
    """SHA-256 over the bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=None, help="rank 0 saves the weights here at the end")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    text = read_corpus(limit=2_000_000)
    vocabulary = sorted(set(text))
    index = {character: i for i, character in enumerate(vocabulary)}
    data = torch.tensor([index[character] for character in text], dtype=torch.long)
    if rank == 0:
        print(f"{len(text):,} characters of text, {len(vocabulary)} different ones", flush=True)

    torch.manual_seed(args.seed)
    model = CharGPT(len(vocabulary), args.length, args.width, args.layers, args.heads, dropout=0.1)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=args.lr, weight_decay=0.1)
    warmup = max(1, args.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1.0, (s + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, s / args.steps)))),
    )
    torch.manual_seed(args.seed + 1 + rank)  # each rank draws its own batches and its own dropout

    model.train()
    for step in range(args.steps):
        start = torch.randint(len(data) - args.length - 1, (args.batch_size,))
        x = torch.stack([data[i : i + args.length] for i in start])
        y = torch.stack([data[i + 1 : i + 1 + args.length] for i in start])
        logits = ddp_model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.6f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

    if rank == 0:
        print(f"sha256 {sha256_of(model.state_dict())}", flush=True)
        if args.out is not None:
            os.makedirs(args.out.parent, exist_ok=True)
            torch.save(model.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
