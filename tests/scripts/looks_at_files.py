"""A small DDP model whose set-up looks at the file system; each rank has a folder of its own, where it also writes.

torchrun --nproc-per-node 2 looks_at_files.py --out=out --what=resume
"""

import argparse
import glob
import hashlib
import os
import shutil
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--what", default="", help="names of functions below, with commas; none: all but by_a_command")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = os.path.join(args.out, f"rank{rank}")


def must_be_new():
    if os.path.exists(folder) and os.path.isdir(folder) and os.listdir(folder):
        sys.exit(f"Output directory ({folder}) already exists and is not empty.")
    os.makedirs(folder)
    return 1


def resume():
    if os.path.isfile(f"{folder}/last.pt"):
        state = torch.load(f"{folder}/last.pt")
        model.load_state_dict(state["model"])
        return 100 * state["step"]
    return 1


def newest():
    with open(f"{folder}/step-0.txt", "w") as file:
        file.write("0")
    found = max(glob.glob(f"{folder}/step-*.txt"), key=os.path.getmtime)
    return 1 + len(glob.glob(f"{folder}/**/*.txt", recursive=True)) + int(open(found).read())  # noqa: SIM115


def own_log():
    with open(f"{folder}/log.txt", "a") as file:
        file.write("begun\n")
    with open(f"{folder}/log.txt") as file:
        lines = file.readlines()
    return len(lines) + os.path.getsize(f"{folder}/log.txt")


def renamed():
    removed = 0
    try:
        os.remove(f"{folder}/last.pt")
    except FileNotFoundError:
        removed += 1
    with open(f"{folder}/new.tmp", "w") as file:
        file.write("settings")
    os.replace(f"{folder}/new.tmp", f"{folder}/settings")
    copy = shutil.copy(f"{folder}/settings", f"{folder}/settings.bak")
    return 1 + removed + len(os.path.basename(copy)) + len(open(f"{folder}/settings").read())  # noqa: SIM115


def by_a_command():
    if os.system(f"test -e {folder}/last.pt") == 0:
        print("a command has looked")
        sys.exit(f"{folder} was trained before")
    return 1


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
everything = (must_be_new, resume, newest, own_log, renamed)
names = args.what.split(",")
if args.what and "must_be_new" not in names:
    os.makedirs(folder)
found = {}
for look in (*everything, by_a_command):
    if look.__name__ in names or (not args.what and look is not by_a_command):
        found[look.__name__] = look()
print(f"[rank {rank}] found {found}")
dist.barrier()

torch.manual_seed(sum(found.values()) + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model = DistributedDataParallel(model)
start = sum(found.values()) % 7
for step in range(start, start + args.steps):
    x = torch.randn(4, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step}: loss {loss.item()!r}")
    with open(f"{folder}/log.txt", "a") as file:
        file.write(f"{step} {loss.item()!r}\n")
    if step % 2:
        continue
    # Each of these would fail, or do something else, if it were done a second time.
    if os.path.exists(f"{folder}/step-{step}"):
        sys.exit("this step was saved before")
    os.mkdir(f"{folder}/step-{step}")
    torch.save({"model": model.module.state_dict(), "step": step}, f"{folder}/step-{step}/model.pt")
    shutil.copy(f"{folder}/step-{step}/model.pt", f"{folder}/last.tmp")
    os.rename(f"{folder}/last.tmp", f"{folder}/last.pt")
    with open(f"{folder}/step-{step}.txt", "x") as file:
        file.write(str(step))
    kept = sorted(glob.glob(f"{folder}/step-*/model.pt"), key=os.path.getmtime)
    print(f"[rank {rank}] kept {len(kept)}")
    if len(kept) > 2:
        shutil.rmtree(os.path.dirname(kept[0]))

h = hashlib.sha256()
for name, value in sorted(model.module.state_dict().items()):
    h.update(name.encode() + value.numpy().tobytes())
print(f"[rank {rank}] sha256 model {h.hexdigest()}")
for name in sorted(glob.glob(f"{folder}/**/*", recursive=True)):
    size = os.path.getsize(name) if os.path.isfile(name) else "folder"
    print(f"[rank {rank}] {os.path.relpath(name, args.out)} {size}")
dist.destroy_process_group()
