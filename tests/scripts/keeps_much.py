"""Holds state where no attribute shows it: in events, C's memory, and where nobody can read it."""

import ctypes
import operator
import queue
import threading
import zlib

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

args = arguments()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

is_warm = threading.Event()
scale = ctypes.c_double(1.0)
column = operator.itemgetter(0)
compressor = zlib.compressobj()


class Inbox(queue.SimpleQueue):
    """Messages."""


inbox = Inbox()


for step in range(30):
    if step == 6:
        is_warm.set()
        column = operator.itemgetter(1)
    scale.value *= 0.97
    compressor.compress(b"x")
    inbox.put(step)
    x = torch.full((3, 4), scale.value)
    loss = column(ddp_model(x)[0]) ** 2 * (2.0 if is_warm.is_set() else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)

finish(model.parameters(), args.out, model.state_dict(), "sha256")
