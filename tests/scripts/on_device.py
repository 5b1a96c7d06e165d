"""A model on an accelerator: DDP, or gradients reduced by hand; --with names what else a script may do there."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--backend", default="hccl", help="'' for torch's choice")
parser.add_argument("--by-hand", action="store_true", help="reduce gradients without DDP")
parser.add_argument("--with", dest="more", default="", help="batchnorm,dropout,fp16,bf16,accumulation,loader,groups")
args = parser.parse_args()
more = set(filter(None, args.more.split(",")))

torch.manual_seed(7)
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
dist.init_process_group(args.backend or None)
rank, world = dist.get_rank(), dist.get_world_size()
group = dist.new_group() if "groups" in more else None


class Noise(torch.nn.Module):
    """Instead of dropout: the simulated NPU cannot capture that in a graph."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


layers = [torch.nn.Linear(16, 256), torch.nn.BatchNorm1d(256) if "batchnorm" in more else torch.nn.Identity()]
dropout = Noise() if more & {"graphs", "whole"} else torch.nn.Dropout(0.2 if "dropout" in more else 0.0)
layers += [torch.nn.ReLU(), dropout, torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)]
model = torch.nn.Sequential(*layers).to(device)
if "graphs" in more:
    torch.get_device_module(device).make_graphed_callables(model, (torch.zeros(8, 16, device=device),))
wrapped = model if args.by_hand else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**18, growth_interval=4, enabled="fp16" in more)
dtype = torch.float16 if "fp16" in more else torch.bfloat16
generator = torch.Generator().manual_seed(rank)
data = torch.randn(256, 16, generator=generator)
loader = DataLoader(TensorDataset(data), batch_size=8, shuffle="loader" in more, pin_memory="pinned" in more)
if "whole" in more:  # a graph of forward, backward and an average of the weights
    given, averages = torch.zeros(8, 16, device=device), [p.detach().clone() for p in model.parameters()]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        loss = (model(given) - given.sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.1)

torch.manual_seed(100 + rank)
step = 0
for epoch in range(1):
    for (x,) in loader:
        x = x.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype, enabled=bool(more & {"fp16", "bf16"})):
            if "whole" not in more:
                loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        if "whole" in more:
            given.copy_(x)
            graph.replay()
        else:
            scaler.scale(loss).backward()
        step += 1
        if "accumulation" in more and step % 2:
            continue
        if args.by_hand:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= world
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none="whole" not in more)
        if step % 4 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            print(f"[rank {rank}] step {step} loss {loss.item()!r} over all ranks {total.item() / world!r}")

state = {name: value.cpu() for name, value in model.state_dict().items()}
state |= {f"average of {at}": value.cpu() for at, value in enumerate(averages if "whole" in more else [])}
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(state, os.path.join(args.out, "final.pt"))
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
print(f"[rank {rank}] scale {scaler.get_scale() if scaler.is_enabled() else 1}")
print(f"[rank {rank}] sha256 model {digest}")
dist.destroy_process_group()
