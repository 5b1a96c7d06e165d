"""A script that comes to a place and stays there, for tests of what ends it.

torchrun --nproc-per-node 2 waits.py --out DIR --place set-up|training|replay [--deaf]
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--place", required=True)
parser.add_argument("--deaf", action="store_true", help="ignore the signals that are meant to end a process")
args = parser.parse_args()

if args.deaf:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
rank = os.environ["RANK"]
os.makedirs(args.out, exist_ok=True)
# A command looks: a replacement answers what Python asks the file system as at first.
is_second = os.system(f"mkdir {args.out}/seen-{rank} 2>/dev/null") != 0


def stay():
    os.close(os.open(os.path.join(args.out, f"stays-{rank}"), os.O_CREAT))
    time.sleep(600)


if args.place == "set-up":
    stay()
dist.init_process_group("gloo")
if args.place == "replay" and is_second:
    stay()
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
step = 0
while True:
    optimizer.zero_grad()
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    step += 1
    if step == 10 and args.place == "training":
        os.close(os.open(os.path.join(args.out, f"stays-{rank}"), os.O_CREAT))
    time.sleep(0.01)
