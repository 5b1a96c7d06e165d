"""A transformer trained as people write it: DataLoader, DistributedSampler, scheduler, clipping, a list of losses.

torchrun --nproc-per-node 2 transformer.py --size large --held lists --samples 4000 --steps 110

--held is what the dataset keeps in memory, beside nothing else:

nothing   each sample is drawn from its number
lists     a list of lists of 64 numbers
tokens    a list of lists of 128 numbers
samples   a list of (path, class), as torchvision's ImageFolder has it
texts     a list of str
rows      a list of dictionaries, as json.load makes it
table     a dictionary of str -> int
numbers   a dictionary of int -> int
paths     a list of pathlib.Path
names     a set of str
queue     a deque of str
objects   a list of objects of a class of the script's
arrays    a list of small numpy arrays
memmap    a numpy.memmap that is only read
arrow     a datasets.Dataset, if that is installed
"""

import time

STARTED_AT_S = time.time()

import itertools  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections import deque  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measured import Steps, framework_arguments, sha256_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "configs" / "examples"))
from char_gpt import CharGPT  # noqa: E402

IMPORTED_AT_S = time.time()
CLASSES = 10
# vocabulary, length, width, layers, heads, batch
SIZES = {"small": (256, 32, 48, 2, 4, 4), "large": (512, 64, 256, 3, 4, 8)}


@dataclass
class Sample:
    """One of --held objects."""

    name: str
    label: int


def make(kind: str, count: int) -> Any:
    """What the dataset keeps in memory."""
    names = (f"train/n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG" for number in range(count))
    if kind in ("lists", "tokens"):
        length = 64 if kind == "lists" else 128
        return [[(number + place) % 1000 for place in range(length)] for number in range(count)]
    if kind == "memmap":
        path = Path(tempfile.gettempdir()) / f"held-{count}-{os.environ['RANK']}-{os.environ['MASTER_PORT']}.bin"
        numpy.arange(count, dtype=numpy.int64).tofile(path)
        mapped = numpy.memmap(path, dtype=numpy.int64, mode="r")
        path.unlink()
        return mapped
    if kind == "arrow":
        from datasets import Dataset as ArrowDataset

        return ArrowDataset.from_dict({"label": [number % CLASSES for number in range(count)]})
    makers = {
        "nothing": lambda: None,
        "samples": lambda: [(name, number % CLASSES) for number, name in enumerate(names)],
        "texts": lambda: list(names),
        "rows": lambda: [{"text": name, "label": number % CLASSES} for number, name in enumerate(names)],
        "table": lambda: {name: number % CLASSES for number, name in enumerate(names)},
        "numbers": lambda: {number: number % CLASSES for number in range(count)},
        "paths": lambda: [Path(name) for name in names],
        "names": lambda: set(names),
        "queue": lambda: deque(names),
        "objects": lambda: [Sample(name, number % CLASSES) for number, name in enumerate(names)],
        "arrays": lambda: [numpy.full(16, number) for number in range(count)],
    }
    return makers[kind]()


class Held(Dataset):
    def __init__(self, kind, count, vocabulary, length):
        self.held = make(kind, count)
        self.count, self.vocabulary, self.length = count, vocabulary, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        text = torch.arange(index, index + self.length + 1) % self.vocabulary
        return text[:-1], text[1:]


def main() -> None:
    parser = framework_arguments(__doc__)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--held", default="nothing")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"])
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.device == "cpu" else "hccl")
    if args.device != "cpu":
        torch.get_device_module(args.device).set_device(dist.get_rank())
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    torch.manual_seed(1)
    vocabulary, length, width, layers, heads, batch = SIZES[args.size]
    data = Held(args.held, args.samples, vocabulary, length)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    model = CharGPT(vocabulary, length, width, layers, heads, dropout=0.1).to(args.device)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    losses, step = [], 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = ddp_model(inputs.to(args.device))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(args.device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            steps.done(step)
            step += 1
            if step == args.steps:
                break
        if step == args.steps:
            break
    if dist.get_rank() == 0:
        print(f"mean loss {sum(losses) / len(losses):.6f}\nsha256 {sha256_of(model.cpu())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
