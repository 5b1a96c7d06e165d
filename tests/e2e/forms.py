"""Training scripts made of parts, each of them source text as people write it, and few scripts for all pairs of parts.

A script spreads its model over the ranks, has a loop, gets its batches from somewhere, and so on: a row names a part of
each kind. `rows` chooses rows so that each two parts that fit each other are in one of them. Read `PARTS` first.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import combinations
from pathlib import Path
from textwrap import indent

from tests.e2e.harness import SCRIPTS

Row = dict[str, str]

HEAD = """
import copy, itertools, os
import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

WIDTH = {width}


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((8,), index / 24) + 0.1 * torch.randn(8)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ahead(loader):
    waiting = None
    for x in loader:
        if waiting is not None:
            yield waiting
        waiting = x
    yield waiting


class Fetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.items = iter(self.loader)
        self.waiting = [next(self.items)]
        return self

    def __next__(self):
        if not self.waiting:
            raise StopIteration
        self.waiting += itertools.islice(self.items, 1)
        return self.waiting.pop(0)


def repeated(loader):
    while True:
        yield from loader


def drawn():
    for number in range(6):
        yield torch.randn(4, 8) * (1 + number / 7)


def lines_of(path):
    with open(path) as file:
        for line in file:
            yield torch.tensor([float(word) for word in line.split()]).repeat(4, 1)


def get_batch():
    return torch.randn(4, 8)
"""
BODY = """
args = arguments()
{device}
rank, world = dist.get_rank(), dist.get_world_size()
os.makedirs(args.out, exist_ok=True)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.ReLU())
net = net.append(nn.Linear(WIDTH, 1)).to(device)
{spread}
{optimizer}
torch.manual_seed(10 + rank)
{batches}
{how}
{beside}
steps, total = 0, 0.0
{loop}
parts = [local(part.detach()).cpu() for part in net.parameters()]
print(f"[rank {{rank}}] total {{total!r}} draw {{torch.rand(()).item()!r}}", flush=True)
finish(parts, args.out, [part.clone() for part in parts])
"""
MESH = 'mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("dp", "tp"))\n'
LAYERS = 'parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})\n'
SHARDED = "fully_shard(net[3], mesh=mesh)\ntrained = fully_shard(net, mesh=mesh)"
FSDP1 = """\
how = {{"device_id": device, "use_orig_params": {original}, "sharding_strategy": ShardingStrategy.{strategy}}}
net[3] = FullyShardedDataParallel(net[3], **how)
net = trained = FullyShardedDataParallel(net, **how)"""
LOADER = "loader = DataLoader(Rows(), batch_size=4, shuffle=True)"
# What each part of a kind is in the script; {}: it is made of others below.
PARTS: dict[str, dict[str, str]] = {
    "spread": {
        "ddp": "trained = DistributedDataParallel(net, bucket_cap_mb=1)",
        "by hand": "trained, group = net, dist.group.WORLD",
        "fsdp2": "mesh = init_device_mesh(device.type, (world,))\n" + SHARDED,
        "hsdp": 'mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("copy", "shard"))\n' + SHARDED,
        "tp": MESH + LAYERS + 'trained, group = net, mesh["dp"].get_group()',
        "fsdp2 tp": MESH + LAYERS + 'mesh = mesh["dp"]\n' + SHARDED,
        "fsdp1": FSDP1.format(original=False, strategy="FULL_SHARD"),
        "fsdp1 original": FSDP1.format(original=True, strategy="SHARD_GRAD_OP"),
        "fsdp1 tp": MESH
        + LAYERS
        + 'net = trained = FullyShardedDataParallel(net, device_id=device, device_mesh=mesh["dp"])',
        "fsdp1 hybrid": 'mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("copy", "shard"))\n'
        "net = trained = FullyShardedDataParallel(\n"
        "    net, device_id=device, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD\n)",
        "hsdp tp": 'whole = init_device_mesh(device.type, (2, world // 4, 2), mesh_dim_names=("copy", "shard", "tp"))\n'
        + LAYERS.replace("mesh[", "whole[")
        + 'mesh = whole["copy", "shard"]\n'
        + SHARDED,
    },
    "optimizer": {
        "sgd": "optimizers = [torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)]",
        "adamw": "optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01)]\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.7)",
        "two": "weights = list(net.parameters())\n"
        "optimizers = [torch.optim.Adam(weights[:1], lr=0.01), torch.optim.SGD(weights[1:], lr=0.02, momentum=0.9)]",
        "zero": "optimizers = [ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)]",
    },
    # an iterable, or "": a call in each step
    "batches": {
        "loader": LOADER,
        "workers": LOADER.replace(")", ", num_workers=1)", 2).replace("(, num_workers=1)", "()"),
        "ahead": LOADER,
        "fetcher": LOADER,
        "composed": LOADER,
        "generator": "",
        "lines": 'path = os.path.join(args.out, f"rows-{rank}.txt")\nwith open(path, "w") as file:\n'
        '    file.writelines(" ".join(str(n * k % 7 / 7) for k in range(8)) + "\\n" for n in range(6))',
        "call": "",
    },
    "loop": dict.fromkeys(("range", "while", "epochs", "generator", "class", "closure"), ""),
    "how": {
        "plainly": "",
        "accumulation": "",
        "clip": "",
        "scaler": "scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=5)",
        "bf16": "",
        "recompute": "",
        "compile": 'trained = torch.compile(trained, backend="aot_eager")',
        "large": "",
    },
    "beside": {
        "nothing": "",
        "average": "average = [local(weight.detach()).clone() for weight in net.parameters()]",
        "validation": "held_out = torch.randn(4, 8).to(device)",
        "checkpoint": "",
        "hooks": "def note(*_):\n"
        '    print(f"[rank {rank}] before step {steps}", flush=True)\n'
        '    with open(os.path.join(args.out, f"hooks-{rank}.txt"), "a") as file:\n'
        '        file.write(f"{steps}\\n")\n\n'
        "register_optimizer_step_pre_hook(note)\n"
        'optimizers[0].register_step_post_hook(lambda *_: print(f"[rank {rank}] behind it", flush=True))',
        "decay": "",
        "gathered": "trained.set_reshard_after_forward(False)\ntrained.set_modules_to_forward_prefetch([net[3]])",
        "frozen": "",
        "whole": "",
    },
    "scope": {"module": "", "main": ""},
    "first": dict.fromkeys(("forward", "backward", "collective", "before_step", "in_step", "after_step"), ""),
    "second": dict.fromkeys(("after_step", "in_step", "before_step", "collective", "backward", "forward"), ""),
    "lost": {"0": "", "1": ""},
    "device": {
        "cpu": 'device = torch.device("cpu")\ndist.init_process_group("gloo")',
        "npu": 'device = torch.device("npu", int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())\n'
        'torch.accelerator.set_device_index(device.index)\ndist.init_process_group("hccl")',
    },
}
SOURCES = {
    "ahead": "ahead(loader)",
    "composed": "(x for _, x in zip(itertools.count(), itertools.islice(repeated(loader), 6)))",
    "fetcher": "Fetcher(loader)",
    "generator": "drawn()",
    "lines": "lines_of(path)",
}
FORWARD = {"recompute": "checkpoint(trained, x, use_reentrant=False)"}
BF16 = "with torch.autocast(device.type, torch.bfloat16):\n    y = trained(x)\n"
BEFORE = {
    "clip": "nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
    "scaler": "for optimizer in optimizers:\n    scaler.unscale_(optimizer)",
}
AFTER = {
    "average": "for mean, weight in zip(average, net.parameters()):\n    mean.lerp_(local(weight.detach()), 0.1)",
    "validation": "if steps % 3 == 2:\n    net.eval()\n    with torch.no_grad():\n"
    "        total += trained(held_out).sum().item()\n    net.train()",
    "decay": "with torch.no_grad():\n    for weight in net.parameters():\n        weight.mul_(0.99)",
    "frozen": "if steps == 5:\n    net[0].requires_grad_(False)",
    "whole": "if steps % 3 == 2:\n    with FullyShardedDataParallel.summon_full_params(trained, writeback=False):\n"
    "        total += sum(part.norm() for part in trained.parameters()).item()",
    "checkpoint": "if steps % 4 == 3:\n"
    "    saved = [local(part.detach()) for part in net.parameters()]\n"
    '    torch.save(saved, os.path.join(args.out, f"step{steps}-{rank}.pt"))',
}
AVERAGED = """\
for weight in net.parameters():
    dist.all_reduce(local(weight.grad), group=group)
    local(weight.grad).div_(group.size())"""
RANKS = {"hsdp": 4, "tp": 4, "fsdp2 tp": 4, "fsdp1 tp": 4, "fsdp1 hybrid": 4, "hsdp tp": 8}  # else 2
# Tried with one script each.
SELDOM = {
    "fsdp1 hybrid": "adamw loader epochs plainly whole main forward backward 1 cpu",
    "hsdp tp": "adamw loader epochs plainly nothing main backward in_step 0 cpu",
}
# Parts that only these have.
ONLY = {
    "zero": ("ddp",),
    "scaler": ("ddp", "by hand"),
    "compile": ("ddp", "by hand", "fsdp2"),
    "large": ("ddp", "by hand"),
    # Behind it no record can read the views that FSDP1 has of its flat parameter.
    "recompute": ("ddp", "by hand", "fsdp2", "hsdp", "tp", "fsdp2 tp", "fsdp1 original"),
    "gathered": ("fsdp2", "hsdp"),
    "frozen": ("fsdp2",),
    "whole": ("fsdp1", "fsdp1 original", "fsdp1 hybrid"),
    "npu": ("ddp", "by hand", "hsdp"),
    "clip": ("ddp", "by hand", "fsdp2", "hsdp", "fsdp1", "fsdp1 original"),
}
NOT_ON_DEVICE = {"zero", "compile", "recompute", "hooks", "checkpoint", "decay"}


def fits(row: Row) -> bool:
    """Whether there is such a script, as far as the row says."""
    spreads = (row["spread"],) if "spread" in row else tuple(PARTS["spread"])
    parts = set(row.values())
    return any(goes_with(spread, parts) for spread in spreads) and not (
        {"zero", "scaler"} <= parts
        or ("closure" in parts and parts & {"two", "scaler"})
        or ("npu" in parts and parts & NOT_ON_DEVICE)
        or row.get("first", "") == row.get("second", " ")
    )


def goes_with(spread: str, parts: Collection[str]) -> bool:
    """Whether the model can be spread so in a script with these parts."""
    if spread in SELDOM and not set(parts) <= {spread, *SELDOM[spread].split()}:
        return False
    return all(spread in ONLY.get(part, (spread,)) for part in parts) and not (
        "clip" in parts and spread.endswith("tp")
    )


def step_of(row: Row) -> str:
    """A step of the training with the batch `x`."""
    how = row["how"]
    y = BF16 if how == "bf16" else f"y = {FORWARD.get(how, 'trained(x)')}\n"
    loss = y + "loss = (y.float() - x.sum(1, keepdim=True)).square().mean()\n"
    backward = "loss.backward()"
    if how == "scaler":  # one step is left out
        backward = 'scaler.scale(loss * (float("inf") if steps == 4 else 1.0)).backward()'
    work = loss + backward
    if how == "accumulation":
        work = "for half in x.chunk(2):\n" + indent(
            (loss + backward).replace("(x", "(half").replace("- x", "- half"), "    "
        )
    zero = "for optimizer in optimizers:\n    optimizer.zero_grad()"
    before = "trained.clip_grad_norm_(0.5)" if how == "clip" and "fsdp1" in row["spread"] else BEFORE.get(how, "")
    gradients = [zero, work, AVERAGED if row["spread"] in ("by hand", "tp") else "", before]
    step = "for optimizer in optimizers:\n    optimizer.step()"
    if how == "scaler":
        step = "for optimizer in optimizers:\n    scaler.step(optimizer)\nscaler.update()"
    if row["loop"] == "closure":
        closure = "\n".join(filter(None, [*gradients, "return loss"]))
        gradients, step = [f"def closure():\n{indent(closure, '    ')}"], "loss = optimizers[0].step(closure)"
    schedule = "scheduler.step()" if row["optimizer"] == "adamw" else ""
    told = """total += loss.item()
steps += 1
print(f"[rank {rank}] step {steps} loss {loss.item()!r}", flush=True)"""
    return "\n".join(filter(None, ["x = x.to(device)", *gradients, step, schedule, AFTER.get(row["beside"], ""), told]))


def loop_of(row: Row) -> str:
    """Two epochs of 6 steps."""
    step, source = step_of(row), SOURCES.get(row["batches"], "loader")
    is_call = row["batches"] == "call"
    each = "for _ in range(6):\n    x = get_batch()\n" if is_call else f"for x in {source}:\n"
    again = f"try:\n    x = next(source)\nexcept StopIteration:\n    source = iter({source})\n    x = next(source)\n"
    begin, ask = ("", "x = get_batch()\n") if is_call else (f"source = iter({source})\n", again)
    epochs = f"for epoch in range(2):\n{indent(each + indent(step, '    '), '    ')}"
    shared = "global" if row["scope"] == "module" else "nonlocal"
    match row["loop"]:
        case "range":
            return f"{begin}for step in range(12):\n{indent(ask + step, '    ')}"
        case "while":
            return f"{begin}while True:\n{indent(ask + step, '    ')}\n    if steps == 12:\n        break"
        case "generator":
            inner = f"{shared} steps, total\n{each}{indent(step + chr(10) + 'yield loss.item()', '    ')}"
            used = "for epoch in range(2):\n    for loss in train():\n        total += loss"
            return f"def train():\n{indent(inner, '    ')}\n\n{used}"
        case "class":
            take = f"{shared} steps, total\ntrained, optimizers = self.trained, self.optimizers\n{step}"
            return (
                "class Trainer:\n"
                "    def __init__(self, trained, optimizers):\n"
                "        self.trained, self.optimizers = trained, optimizers\n\n"
                f"    def take(self, x):\n{indent(take, '        ')}\n\n"
                f"    def fit(self):\n        for epoch in range(2):\n{indent(each, '            ')}"
                "                self.take(x)\n\nTrainer(trained, optimizers).fit()"
            )
    return epochs


def text_of(row: Row) -> str:
    """The script."""
    chosen = {kind: PARTS[kind][row[kind]] for kind in ("spread", "optimizer", "batches", "how", "beside", "device")}
    if row["how"] == "bf16" and row["spread"] in ("fsdp2", "hsdp"):
        policy = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        chosen["spread"] = chosen["spread"].replace(", mesh=mesh)", f", mesh=mesh, {policy})")
    if row["device"] == "npu" and row["spread"] == "tp":  # a step of all parameters at once wants them alike
        chosen["optimizer"] = chosen["optimizer"].replace("lr=", "foreach=False, lr=")
    if row["optimizer"] == "two" and row["spread"] == "fsdp1 tp":  # each has a flat parameter of its own
        fsdp1 = 'FullyShardedDataParallel(net[3], device_id=device, device_mesh=mesh["dp"])'
        chosen["spread"] = chosen["spread"].replace("net = trained", f"net[3] = {fsdp1}\nnet = trained")
    body = BODY.format(**chosen, loop=loop_of(row))
    if row["scope"] == "main":
        body = f'\ndef main():\n{indent(body, "    ")}\n\nif __name__ == "__main__":\n    main()\n'
    return HEAD.replace("{width}", "520" if row["how"] == "large" else "24") + body


def row_of(**chosen: str) -> Row:
    """The first part of each kind, but for these."""
    return {kind: next(iter(parts)) for kind, parts in PARTS.items()} | chosen


def write(row: Row, folder: Path) -> tuple[str, int, list[str]]:
    """Write a row's script there; returns its path, its number of ranks, and the faults."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "around_the_loop.py", folder)
    (folder / "train.py").write_text(text_of(row))
    ranks = RANKS.get(row["spread"], 2)
    kills = []
    for rank, step, phase in ((int(row["lost"]), 4, row["first"]), (1 - int(row["lost"]), 8, row["second"])):
        # From the first of two steps on, the other optimizer's gradients would be needed, which no rank keeps.
        step += row["optimizer"] == "two" and phase in ("in_step", "after_step")
        kills.append(f"kill:rank={rank},step={step},phase={phase}")
    return str(folder / "train.py"), ranks, kills


def pairs_of(row: Row) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def rows() -> Iterator[Row]:
    """Rows in which all pairs are that fit: each takes as many new ones as it can, and of parts that give the same the
    one that is least used."""
    parts = [(kind, part) for kind, of_kind in PARTS.items() for part in of_kind]
    left = {frozenset(pair): None for pair in combinations(parts, 2) if len(dict(pair)) == 2 and fits(dict(pair))}
    used: Counter[tuple[str, str]] = Counter()
    while left:
        row = dict(sorted(next(iter(left))))
        for kind in PARTS:
            fitting = [row | {kind: part} for part in PARTS[kind] if row.get(kind, part) == part]
            row = max(filter(fits, fitting), key=lambda one: (len(pairs_of(one) & left.keys()), -used[kind, one[kind]]))
        for pair in pairs_of(row):
            left.pop(pair, None)
        used.update(row.items())
        yield {kind: row[kind] for kind in PARTS}
