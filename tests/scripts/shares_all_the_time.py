"""Forked children put tensors into shared memory without a pause, as a DataLoader's workers do with batches."""

import multiprocessing
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def share():
    while True:
        torch.empty(8).untyped_storage()._share_fd_cpu_()


def share_in_a_thread():
    """A queue of multiprocessing pickles in a thread of its own."""
    thread = threading.Thread(target=share)
    thread.start()
    thread.join()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=kind, daemon=True) for kind in (share, share_in_a_thread) * 2]
        for child in children:
            child.start()
    if step == 100:
        print("shares", flush=True)
