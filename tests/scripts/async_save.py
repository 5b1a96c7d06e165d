"""Checkpoints written by torch's dcp.async_save, on a thread and a group of its own. Nothing here knows of a launcher.

--open FROM:TO   the save of step FROM stays open until step TO has been taken
"""

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments(steps=30, every=6, open="")
opens, closes = map(int, args.open.split(":")) if args.open else (-1, -1)
may_end = threading.Event()


class Writer(dcp.FileSystemWriter):
    """Writes when it may."""

    def write_data(self, *given, **named):
        if str(self.path).endswith(f"/{opens}"):
            may_end.wait(120)
        return super().write_data(*given, **named)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saving = dist.new_group(backend="gloo")
    torch.manual_seed(3)
    model = nn.Linear(8, 1)
    trained = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(10 + rank)
    save = None
    for step in range(args.steps):
        x = torch.randn(16, 8)
        loss = (trained(x) - x.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
        if step == closes:
            may_end.set()
        if step % args.every == args.every - 1:
            if save is not None and step != opens + args.every:
                save.result()
            writer = Writer(f"{args.out}/checkpoints/{step}")
            save = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, process_group=saving)
    may_end.set()
    save.result()
    finish(model.state_dict().values(), args.out, model.state_dict())


main()
