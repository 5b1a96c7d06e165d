"""Logs through a queue and a thread, as TensorBoard's writer does."""

import os
import queue
import threading

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel


class Writer(threading.Thread):
    """Writes what comes through its queue."""

    def __init__(self, entries: queue.Queue, path: str) -> None:
        super().__init__(daemon=True)
        self.entries = entries
        self.file = open(path, "w")  # noqa: SIM115 - closed at the end of the run

    def run(self) -> None:
        while (entry := self.entries.get()) is not None:
            print(*entry, file=self.file, flush=True)
        self.file.close()


class Events:
    """What the script uses."""

    def __init__(self, path: str) -> None:
        self.entries: queue.Queue = queue.Queue(20)
        self.thread = Writer(self.entries, path)
        self.thread.start()

    def add(self, *entry: object) -> None:
        self.entries.put(entry)

    def close(self) -> None:
        self.entries.put(None)
        self.thread.join()


args = arguments()

dist.init_process_group("gloo")
os.makedirs(args.out, exist_ok=True)
events = Events(os.path.join(args.out, f"events-{dist.get_rank()}.txt"))
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(30):
    loss = (ddp_model(torch.randn(8, 4)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    events.add("loss", step, f"{loss.item():.6f}")
    print(f"step {step} loss {loss.item():.6f}", flush=True)

events.close()
finish(model.parameters(), args.out, model.state_dict(), "sha256")
