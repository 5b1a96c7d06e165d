"""A small training loop whose dataset holds many samples in memory, as people keep them: for overhead.py --held.

torchrun --nproc-per-node 2 held_data.py --held samples --samples 1280000 --steps 110

samples   a list of (path, class), as torchvision's ImageFolder has it
texts     a list of str
rows      a list of dictionaries, as json.load makes it
table     a dictionary of str -> int
paths     a list of pathlib.Path
memmap    a numpy.memmap that is only read
arrow     a datasets.Dataset, if that is installed
"""

import time

STARTED_AT_S = time.time()

import os  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measured import Steps, framework_arguments, sha256_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

IMPORTED_AT_S = time.time()
WIDTH, CLASSES = 768, 10


def make(kind: str, count: int) -> Any:
    """The samples."""
    names = (f"train/n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG" for number in range(count))
    if kind == "samples":
        return [(name, number % CLASSES) for number, name in enumerate(names)]
    if kind == "texts":
        return list(names)
    if kind == "rows":
        return [{"text": name, "label": number % CLASSES} for number, name in enumerate(names)]
    if kind == "table":
        return {name: number % CLASSES for number, name in enumerate(names)}
    if kind == "paths":
        return [Path(name) for name in names]
    if kind == "memmap":
        path = Path(tempfile.gettempdir()) / f"held-{count}-{os.environ['RANK']}-{os.environ['MASTER_PORT']}.bin"
        numpy.arange(count, dtype=numpy.int64).tofile(path)
        mapped = numpy.memmap(path, dtype=numpy.int64, mode="r")
        path.unlink()
        return mapped
    from datasets import Dataset as ArrowDataset

    return ArrowDataset.from_dict({"label": [number % CLASSES for number in range(count)]})


class Held(Dataset):
    def __init__(self, kind, count):
        self.samples = make(kind, count)
        self.names = list(self.samples) if kind == "table" else []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[self.names[index] if self.names else index]
        return torch.full((WIDTH,), float(len(str(sample)))), index % CLASSES


def main() -> None:
    parser = framework_arguments(__doc__)
    parser.add_argument("--held", default="samples")
    parser.add_argument("--samples", type=int, default=1_280_000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    torch.manual_seed(1)
    data = Held(args.held, args.samples)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    layers = [part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, (inputs, targets) in enumerate(loader):
        if step == args.steps:
            break
        loss = nn.functional.cross_entropy(ddp_model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.done(step)
    if dist.get_rank() == 0:
        print(f"sha256 {sha256_of(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
