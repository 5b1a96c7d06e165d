"""Folders and files that are named from the time, each by another call, and a log by TensorBoard if it is there.

torchrun --nproc-per-node 2 names_by_time.py --out DIR
"""

import argparse
import datetime
import hashlib
import os
import random
import time
import uuid
from pathlib import Path

RUN_ID = uuid.uuid4().hex  # before torch is there
BEGAN = time.strftime("%Y%m%d-%H%M%S")

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402


def names():
    """A name by each way to ask."""
    return {
        "uuid": RUN_ID,
        "early": BEGAN,
        "now": datetime.datetime.now().strftime("%b%d_%H-%M-%S.%f"),
        "aware": datetime.datetime.now(datetime.UTC).isoformat(),
        "today": str(datetime.datetime.today()),
        "time": str(time.time()),
        "nanoseconds": str(time.time_ns()),
        "local": time.strftime("%H%M%S", time.localtime()),
        "text": time.ctime().replace(" ", "_"),
        "random": f"{random.random()}-{numpy.random.rand()}",
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tensorboard", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    logs = []
    for kind, name in names().items():
        folder = Path(args.out) / f"runs-{rank}" / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        logs.append(open(folder / "log.txt", "w"))
    writer = None
    if args.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(f"{args.out}/board-{rank}", exist_ok=True)
        os.chdir(f"{args.out}/board-{rank}")
        writer = SummaryWriter()  # runs/<date>_<host>
    torch.manual_seed(1 + rank)
    for step in range(args.steps):
        x = torch.randn(10, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for log in logs:
            print(step, loss.item(), file=log, flush=True)
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)
            writer.flush()
    if writer is not None:
        writer.close()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(f"[rank {rank}] sha256 model {hashlib.sha256(weights).hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
