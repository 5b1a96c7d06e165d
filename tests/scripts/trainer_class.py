"""A Trainer class with a snapshot of its own: run it again and it goes on from the last finished epoch."""

import hashlib
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


@dataclass
class TrainerConfig:
    max_epochs: int = 4
    batch_size: int = 16
    lr: float = 2e-3
    grad_norm_clip: float = 1.0
    save_every: int = 1
    snapshot_path: str = "snapshot.pt"
    device: str = "cpu"


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    scheduler_state: dict
    finished_epoch: int
    best_loss: float
    losses: list


class Trainer:
    def __init__(self, config, model, optimizer, scheduler, train_data, test_data):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_data, shuffle=True)
        self.test_loader = self._prepare_dataloader(test_data, shuffle=False)
        self.epochs_run = 0
        self.steps_run = 0
        self.best_loss = float("inf")
        self.losses = []
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        if os.path.exists(config.snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset, shuffle):
        return DataLoader(
            dataset, batch_size=self.config.batch_size, sampler=DistributedSampler(dataset, shuffle=shuffle)
        )

    def _load_snapshot(self):
        snapshot = Snapshot(**torch.load(self.config.snapshot_path, weights_only=True, map_location=self.config.device))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.scheduler.load_state_dict(snapshot.scheduler_state)
        self.epochs_run = snapshot.finished_epoch + 1
        self.best_loss = snapshot.best_loss
        self.losses = snapshot.losses
        print(f"[rank {self.global_rank}] resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(
            model_state=self.model.module.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            scheduler_state=self.scheduler.state_dict(),
            finished_epoch=epoch,
            best_loss=self.best_loss,
            losses=self.losses,
        )
        tmp = self.config.snapshot_path + ".tmp"
        torch.save(asdict(snapshot), tmp)
        os.replace(tmp, self.config.snapshot_path)
        print(f"[rank {self.global_rank}] snapshot saved at epoch {epoch}")

    def _run_batch(self, source, targets, train=True):
        source, targets = source.to(self.config.device), targets.to(self.config.device)
        with torch.set_grad_enabled(train):
            logits = self.model(source)
            loss = F.cross_entropy(logits, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
            self.scheduler.step()
            self.steps_run += 1
        return loss.item()

    def _run_epoch(self, epoch, loader, train=True):
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        total = 0.0
        progress = tqdm(loader, desc=f"epoch {epoch} {'train' if train else 'test'}", disable=self.global_rank != 0)
        for it, (source, targets) in enumerate(progress):
            loss = self._run_batch(source, targets, train)
            total += loss
            progress.set_postfix(loss=f"{loss:.3f}")
            if train:
                self.losses.append(loss)
                print(f"[rank {self.global_rank}] epoch {epoch} iter {it} step {self.steps_run} loss {loss!r}")
        return total / len(loader)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            train_loss = self._run_epoch(epoch, self.train_loader, train=True)
            test_loss = self._run_epoch(epoch, self.test_loader, train=False)
            self.best_loss = min(self.best_loss, test_loss)
            print(
                f"[rank {self.global_rank}] epoch {epoch} train {train_loss!r} test {test_loss!r} "
                f"best {self.best_loss!r} lr {self.scheduler.get_last_lr()[0]!r}"
            )
            if self.global_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


def two_moons(size, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (size,), generator=g)
    angle = torch.rand(size, generator=g) * torch.pi + labels * torch.pi
    points = torch.stack([angle.cos() + labels, angle.sin() + 0.5 * labels], 1)
    return TensorDataset(points + 0.15 * torch.randn(size, 2, generator=g), labels)


def get_train_objs(world_size, device):
    train_data, test_data = two_moons(192 * world_size, seed=3), two_moons(48 * world_size, seed=4)
    model = nn.Sequential(
        nn.Linear(2, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 2),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TrainerConfig.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    return model, optimizer, scheduler, train_data, test_data


def weights_sha256(model):
    h = hashlib.sha256()
    for name, value in model.state_dict().items():
        h.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


def optimizer_sha256(optimizer):
    h = hashlib.sha256()
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            h.update(f"{index}.{name}".encode() + value.cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


def main():
    args = arguments(epochs=4, device=["cpu", "cuda", "npu"], backend="")

    dist.init_process_group(backend=args.backend or ("hccl" if args.device == "npu" else "gloo"))
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(42)
    if args.device != "cpu":
        device_module = torch.get_device_module(args.device)
        device_module.set_device(rank % device_module.device_count())
        torch.use_deterministic_algorithms(True)
    config = TrainerConfig(
        max_epochs=args.epochs, snapshot_path=os.path.join(args.out, "snapshot.pt"), device=args.device
    )
    model, optimizer, scheduler, train_data, test_data = get_train_objs(dist.get_world_size(), args.device)
    torch.manual_seed(100 + rank)
    trainer = Trainer(config, model, optimizer, scheduler, train_data, test_data)
    trainer.train()
    if rank == 0:
        torch.save(trainer.model.module.state_dict(), os.path.join(args.out, "final.pt"))
    print(f"[rank {rank}] {len(trainer.losses)} losses, sum {sum(trainer.losses)!r}, best {trainer.best_loss!r}")
    print(f"[rank {rank}] sha256 model {weights_sha256(trainer.model.module)}")
    print(f"[rank {rank}] sha256 optimizer {optimizer_sha256(trainer.optimizer)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
