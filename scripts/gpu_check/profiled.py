"""How often a training step waits for the device, as a script of ranks; each rank writes one file of JSON.

    torchrun --nproc-per-node 2 profiled.py --out out --layout ddp

First steps are timed without a profiler, then some are profiled: calls of CUDA that wait, and copies to the host, are
counted by step and thread. Like a script of a user it knows nothing of ttprun. Begin with main().
"""

# ruff: noqa: E402
import argparse
import json
import os
import statistics
import threading
import time
from collections import Counter
from pathlib import Path

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
COUNTED = (*WAITS, "cudaMemcpyAsync", "cudaEventQuery", "cudaLaunchKernel", "cudaStreamWaitEvent")

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--layout", choices=["ddp", "fsdp2"], default="ddp")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--timed", type=int, default=30)
parser.add_argument("--profiled", type=int, default=5)
parser.add_argument("--share", action="store_true")
args = parser.parse_args()
if args.share:  # NCCL reads them when it makes its first communicator
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(7)
accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
kind = "cpu" if accelerator is None else accelerator.type
if accelerator is not None:
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
dist.init_process_group({"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[kind])
rank = dist.get_rank()
layers = [
    nn.Sequential(nn.Linear(args.width, args.width), nn.BatchNorm1d(args.width), nn.GELU()) for _ in range(args.depth)
]
model = nn.Sequential(*layers, nn.Linear(args.width, 1)).to(kind)
trained = model
if args.layout == "ddp":
    trained = DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(8 + rank)
profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])])


def synchronize():
    if kind != "cpu":
        torch.accelerator.synchronize()


took = []
loss = torch.zeros(())
for step in range(5 + args.timed + args.profiled):
    if step == 5 + args.timed:
        synchronize()
        profiler.start()
    began = time.perf_counter()
    batch = torch.randn(64, args.width).to(kind)
    loss = trained(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if 5 <= step < 5 + args.timed:
        synchronize()
        took.append(time.perf_counter() - began)
synchronize()
profiler.stop()

out = Path(args.out)
out.mkdir(parents=True, exist_ok=True)
trace = out / f"trace{rank}.json"
profiler.export_chrome_trace(str(trace))
calls, waited_us, copies = Counter(), Counter(), Counter()
main = threading.get_native_id()
for event in json.loads(trace.read_text())["traceEvents"]:
    if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["name"] in COUNTED:
        where = "main" if event.get("tid") in (main, os.getpid()) else "other"
        calls[f"{event['name']} {where}"] += 1
        waited_us[f"{event['name']} {where}"] += event.get("dur", 0)
    elif event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]:
        copies["copies to the host"] += 1
        copies["bytes to the host"] += int(event.get("args", {}).get("bytes", 0))
trace.unlink()
figures = {"median_step_s": statistics.median(took), "loss": loss.item()}
for counter in (calls, copies):
    figures |= {name: count / args.profiled for name, count in counter.items()}
figures |= {f"µs in {name}": time_us / args.profiled for name, time_us in waited_us.items() if name.split()[0] in WAITS}
if kind == "cuda":
    figures |= {
        "peak allocated MiB": torch.cuda.max_memory_allocated() >> 20,
        "reserved MiB": torch.cuda.max_memory_reserved() >> 20,
    }
(out / f"rank{rank}.json").write_text(json.dumps(figures))
dist.destroy_process_group()
