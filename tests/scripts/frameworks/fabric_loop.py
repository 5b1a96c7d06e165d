"""A loop of the script's own with Lightning's Fabric: accumulation, clipping, a logger, a checkpoint each epoch."""

import argparse
import hashlib
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def main():
    logger = CSVLogger(args.out)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp", loggers=logger)
    fabric.launch()
    fabric.seed_everything(3)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(160, 10, generator=generator)
    classes = (inputs @ torch.randn(10, 3, generator=generator)).argmax(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, classes), batch_size=8, shuffle=True))
    step = 0
    for epoch in range(args.epochs):
        for number, (points, labels) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = nn.functional.cross_entropy(model(points), labels)
                fabric.backward(loss)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                fabric.log("loss", fabric.all_reduce(loss.detach(), reduce_op="mean"), step=step)
        scheduler.step()
        fabric.save(f"{args.out}/epoch{epoch}.ckpt", {"model": model, "optimizer": optimizer, "step": step})
    logger.finalize("success")
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print(f"rank {fabric.global_rank} sha256 {digest.hexdigest()}", flush=True)
    print(f"step {step} loss {loss.item()} rate {scheduler.get_last_lr()}", flush=True)


if __name__ == "__main__":
    main()
