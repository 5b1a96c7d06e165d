"""A script that leaves traces in its process: loggers, exit functions, signal handlers, files, the current directory.

torchrun --nproc-per-node 2 leaves_traces.py --out DIR [--steps N]
"""

import argparse
import atexit
import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import weakref

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--thread", action="store_true", help="have a thread that lives as long as the script")
args = parser.parse_args()

os.makedirs(args.out, exist_ok=True)
os.chdir(args.out)
os.environ["SCRIPT_STARTS"] = str(int(os.environ.get("SCRIPT_STARTS", "0")) + 1)
sys.path.insert(0, "modules")

dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(rank)

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=f"[rank {rank}] %(name)s: %(message)s")
log = logging.getLogger("training")
log.propagate = False
log.addHandler(logging.StreamHandler(sys.stdout))
log.addHandler(logging.FileHandler(f"appended-{rank}.log"))
log.setLevel(logging.INFO)
atexit.register(lambda: print(f"[rank {rank}] bye"))
signal.signal(signal.SIGUSR2, lambda number, frame: print(f"[rank {rank}] signal"))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
atexit.register(helper.kill)
torch.set_default_dtype(torch.float64)
written = open(f"written-{rank}.txt", "w")

if args.thread:
    import threading

    over = threading.Event()

    def wait():
        over.wait()

    threading.Thread(target=wait, daemon=True).start()


class Model(torch.nn.Module):
    made = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self.made.add(self)
        self.layer = torch.nn.Linear(8, 8)
        self.cycle = [self]

    def forward(self, x):
        return self.layer(x)


torch.manual_seed(1)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean() * random.random()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    log.info("step %d loss %r", step, loss.item())
    logging.info("step %d", step)
    written.write(f"{step} {loss.item()!r}\n")

written.close()
os.kill(os.getpid(), signal.SIGUSR2)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"[rank {rank}] sha256 model {digest}")
print(f"[rank {rank}] sha256 written {hashlib.sha256(open(f'written-{rank}.txt', 'rb').read()).hexdigest()}")
print(f"[rank {rank}] sha256 appended {hashlib.sha256(open(f'appended-{rank}.log', 'rb').read()).hexdigest()}")
print(f"[rank {rank}] models {len(Model.made)} starts {os.environ['SCRIPT_STARTS']} dtype {torch.get_default_dtype()}")
if rank == 0:
    torch.save(model.state_dict(), "final.pt")
dist.destroy_process_group()
