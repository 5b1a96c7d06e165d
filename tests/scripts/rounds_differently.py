"""A model whose kernels round differently each time, by bits that nobody controls, in its backward or forward pass.

--layout says how gradients are reduced: by DDP, by one all_reduce each (own), or by FSDP2; --threads how many threads
its kernels have. With `torch.are_deterministic_algorithms_enabled()` (--deterministic) there is no noise.
"""

import hashlib
import os
import time

import numpy
import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = arguments(
    layout=["ddp", "own", "fsdp2"],
    noise=["backward", "forward", "none"],
    device="cpu",
    threads=1,
    deterministic=False,
    width=256,  # from here on, gradients are larger than 64 KiB
    steps=16,
    drift=0.0,  # by which the loss is scaled in each step: a hidden state
)

torch.set_num_threads(args.threads)
torch.use_deterministic_algorithms(args.deterministic)
torch.manual_seed(7)
if args.device == "cpu":
    device = torch.device("cpu")
else:
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    device = torch.device(args.device, torch.accelerator.current_device_index())
dist.init_process_group({"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}[device.type])
rank, world = dist.get_rank(), dist.get_world_size()


def rounded(value):
    """Each element, or the next larger number, as atomic additions in another order would give it."""
    if torch.are_deterministic_algorithms_enabled():
        return value
    bits = numpy.random.default_rng(time.perf_counter_ns()).integers(0, 2, tuple(value.shape), dtype=numpy.uint8)
    larger = torch.nextafter(value.cpu(), torch.tensor(float("inf")))
    return torch.where(torch.from_numpy(bits).bool(), larger, value.cpu()).to(value.device)


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return rounded(x) if args.noise == "forward" else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient) if args.noise == "backward" else gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, args.width), nn.Linear(args.width, args.width)
        self.head = nn.Linear(args.width, 1)

    def forward(self, x):
        x = Rounds.apply(torch.tanh(self.first(x)))
        return self.head(Rounds.apply(torch.tanh(self.second(x))))


model = Model().to(device)
trained = model
if args.layout == "ddp":
    trained = DistributedDataParallel(model, bucket_cap_mb=0.1)
elif args.layout == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.second)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + rank)
# A replacement has another place in it, and nothing records that.
scales = (1 + args.drift * n for n in range(10**6) for _ in range(1)) if args.drift else None

for step in range(args.steps):
    x = torch.randn(32, 16, generator=generator).to(device)
    loss = (trained(x) - x.sum(1, keepdim=True)).square().mean() * (next(scales) if scales else 1)
    loss.backward()
    if args.layout == "own":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"[rank {rank}] step {step} loss {total.item() / world!r}", flush=True)

state = {
    name: (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
    for name, value in model.state_dict().items()
}
digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in state.values()))
for parameter in model.parameters():
    for value in optimizer.state[parameter].values():
        if isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor"):
            digest.update(value.cpu().contiguous().numpy().tobytes())
print(f"[rank {rank}] sha256 model {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
