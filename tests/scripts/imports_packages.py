"""A script that imports two packages of a folder in PYTHONPATH, and can wait in its fifth step for a file "go".

torchrun --nproc-per-node 2 imports_packages.py --out DIR [--wait]
"""

import argparse
import hashlib
import os
import time

os.environ["PACKAGE_MODE"] = "fast"

import slow_package  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import which_rank  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--wait", action="store_true")
args = parser.parse_args()

os.makedirs(args.out, exist_ok=True)
dist.init_process_group("gloo")
assert int(which_rank.RANK) == dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 11):
    inputs = torch.randn(3, 4) * slow_package.SCALE + which_rank.RANK
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 5:
        os.close(os.open(os.path.join(args.out, f"waits-{which_rank.RANK}-{os.getpid()}"), os.O_CREAT))
        while args.wait and not os.path.exists(os.path.join(args.out, "go")):
            time.sleep(0.02)
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("model sha256", digest.hexdigest(), flush=True)
dist.destroy_process_group()
