"""A script that trains with DDP till it is interrupted, and says where it stood then.

torchrun --nproc-per-node 2 interrupted.py --out DIR [--handles-term] [--workers N] [--stays] [--raises]
"""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--handles-term", action="store_true", help="stop at the end of the step in which SIGTERM comes")
parser.add_argument("--workers", type=int, default=0, help="processes that load the data")
parser.add_argument("--stays", action="store_true", help="rank 1 stays before a backward pass")
parser.add_argument("--raises", action="store_true", help="rank 0 fails after SIGTERM, as if a worker had died of it")
args = parser.parse_args()

rank = os.environ["RANK"]
os.makedirs(args.out, exist_ok=True)
signals = []
if args.handles_term or args.raises:
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = torch.utils.data.DataLoader([torch.ones(64)] * 2**14, batch_size=8, num_workers=args.workers)
step = 0
try:
    for inputs in batches:
        is_ended = torch.tensor(len(signals) * (not args.raises))
        dist.all_reduce(is_ended)
        if is_ended:
            break
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        if step == 20:
            os.close(os.open(os.path.join(args.out, f"trains-{rank}"), os.O_CREAT))
        if step == 20 and rank == "1" and args.stays:  # rank 0 goes backward, and waits for it in native code
            time.sleep(600)
        loss.backward()
        optimizer.step()
        step += 1
        if signals and rank == "0" and args.raises:
            time.sleep(0.5)  # the launcher has heard of it, too
            raise RuntimeError("a worker was killed by SIGTERM")
    print("stopped by itself")
except KeyboardInterrupt:
    time.sleep(0.1)  # whoever saves something here is not interrupted again
    print("interrupted")
    sys.exit(3)
