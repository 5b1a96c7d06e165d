"""A classifier trained by Lightning's Trainer as its documentation has it.

torchrun --nproc-per-node 2 lightning_trainer.py --steps 110 --step-logs logs
"""

import time

STARTED_AT_S = time.time()

import os  # noqa: E402
import warnings  # noqa: E402

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from measured import Steps, framework_arguments, sha256_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

IMPORTED_AT_S = time.time()
SAMPLES, WIDTH, CLASSES = 4096, 1024, 10


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.net(inputs), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Report(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.done(trainer.global_step - 1)


def main() -> None:
    args = framework_arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore", ".*num_workers.*")
    L.seed_everything(1)
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,)))
    callbacks: list[Callback] = [Report(steps)]
    if args.checkpoint:
        callbacks.append(
            ModelCheckpoint(args.checkpoint, every_n_train_steps=args.checkpoint_every, save_last=True, save_top_k=0)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=args.steps,
        callbacks=callbacks,
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=False,
        logger=False,
    )
    model = Classifier()
    last = args.checkpoint / "last.ckpt" if args.checkpoint else None
    trainer.fit(
        model, DataLoader(data, batch_size=64, shuffle=True), ckpt_path=last if last and last.exists() else None
    )
    if trainer.is_global_zero:
        print(f"sha256 {sha256_of(model)}", flush=True)


if __name__ == "__main__":
    main()
