"""A classifier trained by Lightning's Trainer as its documentation has it; the arguments add what people use."""

import argparse
import hashlib
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--logger", choices=["csv", "tensorboard"], default="csv")
args = parser.parse_args()


class Points(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(224, 10, generator=generator)
        classes = (inputs @ torch.randn(10, 3, generator=generator)).argmax(1)
        self.train = TensorDataset(inputs[:160], classes[:160])
        self.val = TensorDataset(inputs[160:], classes[160:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Classifier(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.seen = SumMetric()

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        loss = F.cross_entropy(self.net(inputs), classes)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.seen.update(len(classes))
        return loss

    def on_train_epoch_end(self):
        self.log("seen", self.seen)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx):
        inputs, classes = batch
        outputs = self.net(inputs)
        self.log("val_loss", F.cross_entropy(outputs, classes), prog_bar=True, sync_dist=True)
        self.accuracy.update(outputs, classes)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoOptimizers(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        inputs, classes = batch
        loss = F.cross_entropy(self.net(inputs), classes)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        outputs = self.net(inputs)
        penalized = F.cross_entropy(outputs, classes) + 0.1 * outputs.square().mean()
        second.zero_grad()
        self.manual_backward(penalized)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        self.log_dict({"loss": loss, "penalized": penalized}, prog_bar=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.01)
        second = torch.optim.SGD([*self.net[2].parameters(), *self.net[4].parameters()], lr=0.05, momentum=0.9)
        steps = torch.optim.lr_scheduler.StepLR
        return [first, second], [steps(first, 1, 0.5), steps(second, 1, 0.7)]


if __name__ == "__main__":
    L.seed_everything(7, workers=True)
    model = TwoOptimizers() if args.manual else Classifier()
    callbacks = [
        ModelCheckpoint(save_last=True, monitor="val_loss", save_top_k=2),
        LearningRateMonitor("step"),
        RichProgressBar(),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=3,
        callbacks=callbacks,
        logger=CSVLogger(args.out) if args.logger == "csv" else TensorBoardLogger(args.out),
        log_every_n_steps=1,
    )
    trainer.fit(model, datamodule=Points())
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if "running" not in name:  # each rank has its own
            digest.update(tensor.numpy().tobytes())
    for optimizer in trainer.optimizers:
        for state in optimizer.state_dict()["state"].values():
            for value in state.values():
                digest.update(value.numpy().tobytes() if torch.is_tensor(value) else repr(value).encode())
    rates = [config.scheduler.get_last_lr() for config in trainer.lr_scheduler_configs]
    print(f"rank {trainer.global_rank} sha256 {digest.hexdigest()}", flush=True)
    print(f"steps {trainer.global_step} rates {rates} {trainer.callback_metrics}", flush=True)
