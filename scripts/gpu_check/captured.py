"""A script of ranks that trains, then captures an all-reduce in a graph of the device, replays it, and trains on.

    torchrun --nproc-per-node 2 captured.py --out out

Like a script of a user it knows nothing of ttprun, which cannot protect it from the capture on. Begin at the loop.
"""

# ruff: noqa: E402
import argparse
import hashlib
import os

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--share", action="store_true")
args = parser.parse_args()
if args.share:  # NCCL reads them when it makes its first communicator
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.distributed as dist

torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fixed = torch.ones(4096, device="cuda")
graph = None
for step in range(8):
    batch = torch.full((8, 64), 0.01 * (step + rank), device="cuda")
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(fixed)
    if graph is not None:
        fixed.fill_(float(step + rank))
        graph.replay()
        torch.cuda.synchronize()
        print(f"[rank {rank}] step {step}: a captured all_reduce gives {fixed[0].item()}", flush=True)
digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())).hexdigest()
print(f"[rank {rank}] sha256 model {digest}", flush=True)
del graph  # before its communicator
dist.destroy_process_group()
