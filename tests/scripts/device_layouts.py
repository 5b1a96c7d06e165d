"""A model on an accelerator in each layout, "own": gradients reduced by hand; --with names what else a script does.

--backend "": the device's own; --gate: a file that step 12 waits for. On one GPU (--share) NCCL takes the ranks for
processes on different machines, and connects them by sockets.
"""

import os
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

layouts = ["ddp", "own", "zero1", "tp", "fsdp1", "fsdp2", "hsdp"]
options = {"layout": layouts, "backend": "", "with": "", "gate": "", "share": False}
args = arguments(**options, steps=24, width=128, blocks=2)
more = set(filter(None, getattr(args, "with").split(",")))
if args.share:  # NCCL reads them when it makes its first communicator
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
if "noise" not in more:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
device = torch.device("cpu")
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
backend = args.backend or {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[device.type]
dist.init_process_group(backend, device_id=device if "device_id" in more else None)
rank, world = dist.get_rank(), dist.get_world_size()
if "pool" in more:  # memory that NCCL's user buffers use
    dist.group.WORLD._get_backend(device).register_mem_pool(None)


class Long(torch.autograd.Function):
    """Kernels that take ten times as long as those of a layer of 7B parameters, on the simulated NPU."""

    @staticmethod
    def forward(ctx, x):
        torch.npu._sleep(41)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.npu._sleep(83)
        return gradient


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 4, -1).transpose(1, 2) for t in self.attend(self.norm(x)).chunk(3, -1))
        x = Long.apply(x) if "long" in more else x
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(args.blocks))
        self.norm = nn.BatchNorm1d(width) if "syncbn" in more else nn.Identity()
        self.head = nn.Linear(width, 64)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


model = Model(args.width).to(device)
if "syncbn" in more:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
trained = model
if args.layout in ("ddp", "zero1"):
    trained = DistributedDataParallel(model, bucket_cap_mb=0.01 if more & {"powersgd", "halves"} else None)
    if "powersgd" in more:  # each bucket's all-reduce is followed by two more, which its callbacks issue
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if "halves" in more:
        trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
elif args.layout == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.blocks[0])})
    trained = model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)
elif args.layout in ("fsdp2", "hsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((world,), ("shard",)) if args.layout == "fsdp2" else ((2, world // 2), ("copy", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif args.layout == "tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh(device.type, (world,)), plan)
if args.layout == "zero1":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False if args.layout == "tp" else None)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, growth_interval=4, enabled="fp16" in more)
data = TensorDataset(torch.randint(0, 64, (8 * min(args.steps, 500), 17), generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(data, *((1, 0) if args.layout == "tp" else (world, rank)))
loader = DataLoader(data, batch_size=4, sampler=sampler, pin_memory=device.type != "cpu")
every = 2 if "accumulation" in more else 1

done = seen = epoch = 0
while done < args.steps:
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        while done == 12 and args.gate and not os.path.exists(args.gate):
            time.sleep(0.02)
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.float16, enabled="fp16" in more):
            logits = trained(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / every
        scaler.scale(loss).backward()
        seen += 1
        if seen % every:
            continue
        if args.layout == "own":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        scaler.unscale_(optimizer)
        if args.layout != "tp":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if "loss" in more:
            dist.all_reduce(total, op=dist.ReduceOp.AVG if device.type != "cpu" else dist.ReduceOp.SUM)
        if "barrier" in more:
            dist.barrier()
        if "objects" in more and done % 4 == 0:
            everywhere = [None] * world
            dist.all_gather_object(everywhere, {"rank": rank, "step": done})
        print(f"[rank {rank}] step {done} loss {total.item():.9g}", flush=True)
        if "times" in more:
            print(f"[rank {rank}] step {done} ended at {time.monotonic():.4f}", flush=True)
        done += 1
        if done == args.steps // 2 and "long" in more:
            torch.npu.synchronize()
            exposed, begun, since = torch.npu.exposed(), done, time.monotonic()
        if done == args.steps:
            break
    epoch += 1

if "long" in more:
    steps, waits, seconds = done - begun, torch.npu.exposed() - exposed, time.monotonic() - since
    print(f"[rank {rank}] {waits} exposed waits in {steps} steps of {seconds / steps * 1000:.1f} ms", flush=True)
if "peak" in more:
    print(f"[rank {rank}] peak {torch.get_device_module(device).max_memory_allocated()} bytes", flush=True)
state = {
    name: (getattr(value, "to_local" if "peak" in more else "full_tensor", lambda value=value: value)()).cpu()
    for name, value in model.state_dict().items()
}
finish(state.values(), args.out, state)
