"""Image classification with DDP: epochs over a DataLoader, BatchNorm, EMA, validation, a checkpoint each epoch."""

import copy
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    """Noisy pictures of four kinds of stripes, shifted and flipped at random when training."""

    def __init__(self, size, train, seed):
        g = torch.Generator().manual_seed(seed)
        self.train = train
        self.labels = torch.randint(0, 4, (size,), generator=g)
        base = torch.zeros(4, 3, 16, 16)
        base[0, :, ::4, :] = 1.0
        base[1, :, :, ::4] = 1.0
        base[2, 0] = torch.eye(16)
        base[3, 2, 4:12, 4:12] = 1.0
        self.images = base[self.labels] + 0.6 * torch.randn(size, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.images[i]
        if self.train:
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
            dy, dx = torch.randint(-2, 3, (2,)).tolist()
            x = torch.roll(x, (dy, dx), (1, 2))
        return x, self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.drop(x.mean((2, 3))))


def sha(obj):
    h = hashlib.sha256()

    def feed(o):
        if isinstance(o, torch.Tensor):
            h.update(o.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(o, dict):
            for k, v in o.items():
                h.update(repr(k).encode())
                feed(v)
        elif isinstance(o, (list, tuple)):
            for v in o:
                feed(v)
        else:
            h.update(repr(o).encode())

    feed(obj)
    return h.hexdigest()


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)
    for e, b in zip(ema.buffers(), model.buffers()):
        e.copy_(b)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    totals = torch.zeros(3, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        totals[0] += F.cross_entropy(outputs, labels, reduction="sum")
        totals[1] += (outputs.argmax(1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), int(totals[1]), int(totals[2])


def main():
    args = arguments(epochs=3, per_rank=112, batch_size=8, workers=2, seed=1, device=["cpu", "cuda", "npu"], backend="")

    dist.init_process_group(args.backend or ("hccl" if args.device == "npu" else "gloo"))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    if args.device != "cpu":
        device_module = torch.get_device_module(args.device)
        device_module.set_device(rank % device_module.device_count())
        torch.use_deterministic_algorithms(True)

    train_set = Shapes(args.per_rank * world, train=True, seed=10)
    val_set = Shapes(24 * world, train=False, seed=11)
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, drop_last=True
    )
    val_loader = DataLoader(val_set, batch_size=12, sampler=val_sampler)

    net = Net().to(args.device)
    ema = copy.deepcopy(net)
    model = DDP(net)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)  # per step
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)  # per epoch
    best_acc = 0.0

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        running_loss, correct, total = 0.0, 0, 0
        for i, (images, labels) in enumerate(train_loader):
            images, labels = images.to(args.device), labels.to(args.device)
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            update_ema(ema, net, 0.9)

            running_loss += loss.item()
            _, predicted = outputs.max(1)
            total += labels.size(0)
            correct += predicted.eq(labels).sum().item()
            print(
                f"[rank {rank}] epoch {epoch} step {i} loss {loss.item()!r} mean {running_loss / (i + 1)!r} "
                f"acc {correct}/{total} norm {norm.item()!r} lr {optimizer.param_groups[0]['lr']!r}"
            )
        decay.step()

        val_loss, val_correct, val_total = validate(ema, val_loader, args.device)
        acc = val_correct / val_total
        print(f"[rank {rank}] epoch {epoch} validation loss {val_loss!r} correct {val_correct}/{val_total}")
        is_best = acc > best_acc
        best_acc = max(acc, best_acc)
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            state = {
                "epoch": epoch,
                "model": net.state_dict(),
                "ema": ema.state_dict(),
                "optimizer": optimizer.state_dict(),
                "best_acc": best_acc,
            }
            torch.save(state, os.path.join(args.out, "checkpoint.pt"))
            if is_best:
                torch.save(state, os.path.join(args.out, "best.pt"))
        dist.barrier()

    if rank == 0:
        torch.save(net.state_dict(), os.path.join(args.out, "final.pt"))
    print(f"[rank {rank}] best accuracy {best_acc!r}")
    print(f"[rank {rank}] sha256 model {sha(dict(net.named_parameters()))}")
    print(f"[rank {rank}] sha256 buffers {sha(dict(net.named_buffers()))}")
    print(f"[rank {rank}] sha256 ema {sha(ema.state_dict())}")
    print(f"[rank {rank}] sha256 optimizer {sha(optimizer.state_dict())}")
    print(f"[rank {rank}] sha256 schedulers {sha([warmup.state_dict(), decay.state_dict()])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
