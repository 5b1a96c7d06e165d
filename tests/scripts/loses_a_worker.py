"""DDP with DataLoader workers; one worker of rank 0 is killed, once, while the main thread is in a given place.

torchrun --nproc-per-node 2 loses_a_worker.py --out DIR [--place backward|next|set-up]

"set-up" is the next batch of a second process of the rank, before it has taken a step.
"""

import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

args = arguments(place="")
os.makedirs(args.out, exist_ok=True)
STEPS, AT = 16, 5
RANK = int(os.environ["RANK"])


def is_first(name: str) -> bool:
    """Whether nobody has been here before."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(os.path.join(args.out, name), os.O_CREAT | os.O_EXCL))
        return True
    return False


is_second_process = not is_first(f"began-{RANK}")


class Points(Dataset):
    def __len__(self) -> int:
        return 2 * STEPS * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        at_next = args.place == "next" and index // 8 == AT
        at_set_up = args.place == "set-up" and is_second_process
        if RANK == 0 and (at_next or at_set_up) and is_first("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.arange(8.0).add(index).sin()


def kill_worker() -> None:
    """Kill a worker, and return when it is dead."""
    pid = batches._workers[0].pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    is_first("dead")


def come_to(place: str) -> None:
    """The main thread of each rank is there. Rank 1 comes later to where rank 0 then waits for it."""
    if step != AT or place != args.place:
        return
    if RANK == 1:
        while not os.path.exists(os.path.join(args.out, "dead")):
            time.sleep(0.001)
    elif is_first("killed"):
        kill_worker()


dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
net[2].weight.register_hook(lambda gradient: come_to("backward") if RANK == 0 else None)
torch.manual_seed(1 + RANK)
points = Points()
loader = DataLoader(points, batch_size=4, sampler=DistributedSampler(points, shuffle=False), num_workers=2)
batches = iter(loader)
for step in range(STEPS):
    batch = next(batches)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    optimizer.step()
    print(f"[rank {RANK}] step {step} loss {loss.item()!r} mean {mean.item()!r}")
finish(net.parameters(), args.out, net.state_dict())
