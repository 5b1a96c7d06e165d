"""Four styles of training loops on an accelerator; --with names what else they do there."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--style", choices=["epochs", "while", "class", "two"], default="epochs")
parser.add_argument("--with", dest="more", default="", help="batchnorm,dropout,fp16,bf16,accumulation")
args = parser.parse_args()
more = set(filter(None, args.more.split(",")))
STEPS = 16

torch.manual_seed(7)
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
dist.init_process_group("hccl" if device.type == "npu" else "nccl")
rank, world = dist.get_rank(), dist.get_world_size()
dtype = torch.float16 if "fp16" in more else torch.bfloat16
every = 2 if "accumulation" in more else 1


def make_model():
    layers = [torch.nn.Linear(16, 256), torch.nn.BatchNorm1d(256) if "batchnorm" in more else torch.nn.Identity()]
    layers += [torch.nn.ReLU(), torch.nn.Dropout(0.2 if "dropout" in more else 0.0), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)


def make_scaler():
    # The first steps overflow, and are skipped.
    return torch.amp.GradScaler(device.type, init_scale=2.0**18, growth_interval=4, enabled="fp16" in more)


def loss_of(model, x, goal):
    with torch.autocast(device.type, dtype, enabled=bool(more & {"fp16", "bf16"})):
        return (model(x) - goal).square().mean()


def say(step, loss, scaler):
    scale = scaler.get_scale() if scaler.is_enabled() else 1
    print(f"[rank {rank}] step {step} loss {loss.item()!r} scale {scale}")


def finish(*models):
    state = {f"{n}.{name}": value.cpu() for n, one in enumerate(models) for name, value in one.state_dict().items()}
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(state, os.path.join(args.out, "final.pt"))
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(f"[rank {rank}] sha256 model {digest}")
    dist.destroy_process_group()


def train_epochs(loader):
    model, scaler = make_model(), make_scaler()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for epoch in range(2):
        for i, (x,) in enumerate(loader):
            x = x.to(device, non_blocking=True)
            loss = loss_of(wrapped, x, x.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            if i % every:
                continue
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            say(f"{epoch}.{i}", loss, scaler)
    finish(model)


class Trainer:
    def __init__(self, loader):
        self.loader, self.model, self.scaler = loader, make_model(), make_scaler()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.seen = 0

    def take_batch(self, i, x):
        loss = loss_of(self.wrapped, x, x.sum(1, keepdim=True))
        self.scaler.scale(loss).backward()
        self.seen += len(x)
        if i % every == 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            say(self.seen, loss, self.scaler)

    def train(self):
        for _epoch in range(2):
            for i, (x,) in enumerate(self.loader):
                self.take_batch(i, x.to(device))
        finish(self.model)


def train_two(loader):
    pair = make_model(), make_model()
    wrapped = [DistributedDataParallel(one) for one in pair]
    scaler = make_scaler()
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in pair]
    batches = iter(loader)
    for i in range(2 * len(loader) - 1):
        try:
            (x,) = next(batches)
        except StopIteration:
            batches = iter(loader)
            (x,) = next(batches)
        x = x.to(device)
        goals = x.sum(1, keepdim=True), torch.randn(len(x), 1, device=device)
        for model, optimizer, goal in zip(wrapped, optimizers, goals, strict=True):
            loss = loss_of(model, x, goal)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # without accumulation: gradients must not live over another optimizer's step
            optimizer.zero_grad()
        scaler.update()
        say(i, loss, scaler)
    finish(*pair)


generator = torch.Generator().manual_seed(rank)
data = torch.randn(16 * STEPS, 16, generator=generator)
loader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True, pin_memory=True)
torch.manual_seed(100 + rank)
if args.style == "epochs":
    train_epochs(loader)
elif args.style == "class":
    Trainer(loader).train()
elif args.style == "two":
    train_two(loader)
else:
    model, scaler = make_model(), make_scaler()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    done = 0
    x = data[torch.randint(len(data), (16,))].to(device)
    while True:
        for micro in range(every):
            wrapped.require_backward_grad_sync = micro == every - 1
            loss = loss_of(wrapped, x, x.sum(1, keepdim=True)) / every
            x = data[torch.randint(len(data), (16,))].to(device)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        say(done, loss, scaler)
        done += 1
        if done == STEPS:
            break
    finish(model)
