"""One rank is killed at some place after the last step, once all others have come to their ends.

Each rank prints and appends what it does there. The killed one waits for the others' files, which an exit handler of
theirs writes; torchrun, with no place, runs it undisturbed.
"""

import atexit
import hashlib
import io
import os
import signal
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments(place="", lost=1, no_destroy=False)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def path(name):
    return os.path.join(args.out, name)


def say(text):
    print(f"[rank {RANK}] {text}", flush=True)
    with open(path(f"ledger-{RANK}.txt"), "a") as ledger:
        ledger.write(text + "\n")


def touch(name):
    os.close(os.open(path(name), os.O_CREAT | os.O_WRONLY))


def others(is_so):
    while not all(is_so(other) for other in range(WORLD) if other != RANK):
        time.sleep(0.02)


def perhaps_die(place):
    """SIGKILL, the first time, at the ordered place; the other ranks have come to their ends by then."""
    if args.place != place or RANK != args.lost or os.path.exists(path("killed")):
        return
    others(lambda other: os.path.exists(path(f"end-{other}")))
    touch("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def on_exit():
    say("exit handler begins")
    touch(f"end-{RANK}")
    while args.place == "at the end" and RANK != args.lost and not os.path.exists(path("go")):
        time.sleep(0.02)
    say("exit handler ends")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(RANK)
    for step in range(8):
        x = torch.randn(16, 8)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step} loss {loss.item()!r}")
    total = loss.detach().clone()
    dist.all_reduce(total)
    say(f"mean loss {total.item() / WORLD!r}")
    if not args.no_destroy:
        dist.destroy_process_group()
        say("destroyed")
    perhaps_die("after destroy_process_group")
    state = io.BytesIO()
    torch.save(model.module.state_dict(), state)
    if RANK == args.lost:
        with open(path("final.pt"), "wb") as file:
            half = len(state.getvalue()) // 2
            file.write(state.getvalue()[:half])
            file.flush()
            perhaps_die("while it writes the final file")
            file.write(state.getvalue()[half:])
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say(f"sha256 model {hashlib.sha256(weights).hexdigest()}")


os.makedirs(args.out, exist_ok=True)
atexit.register(on_exit)
if __name__ == "__main__":
    main()
