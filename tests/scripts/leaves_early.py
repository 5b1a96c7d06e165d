"""Rank 1 leaves at step 8 with exit code 0, in the way that --how names; rank 0 waits for it in a collective."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments

args = arguments(how=["sys.exit", "os._exit", "handler", "thread"])


def leave() -> None:
    if args.how == "sys.exit":
        sys.exit(0)
    if args.how == "os._exit":
        os._exit(0)
    if args.how == "handler":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    threading.Thread(target=sys.exit, args=(0,)).start()  # which ends by it, and nothing else


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(20):
        if rank == 1 and step == 8:
            leave()
        optimizer.zero_grad()
        model(torch.randn(4, 16)).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
