"""A classifier trained by an Engine of pytorch-ignite, as its documentation has it."""

import argparse

import ignite.distributed as idist
import torch
from digests import print_digests
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, global_step_from_engine
from ignite.metrics import Accuracy, Loss, RunningAverage
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--save", action="store_true")
args = parser.parse_args()


def training(local_rank):
    manual_seed(3)
    x = torch.randn(160, 10)
    y = (x[:, :3].sum(dim=1) > 0).long()
    train_loader = idist.auto_dataloader(TensorDataset(x[:120], y[:120]), batch_size=12, shuffle=True)
    val_loader = idist.auto_dataloader(TensorDataset(x[120:], y[120:]), batch_size=10, shuffle=False)
    model = idist.auto_model(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    criterion = nn.CrossEntropyLoss()

    def train_step(engine, batch):
        model.train()
        inputs, labels = batch
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss.item()}

    trainer = Engine(train_step)
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer, "average")

    def validate(engine, batch):
        model.eval()
        with torch.no_grad():
            return model(batch[0]), batch[1]

    evaluator = Engine(validate)
    Accuracy().attach(evaluator, "accuracy")
    Loss(criterion).attach(evaluator, "loss")

    @trainer.on(Events.ITERATION_COMPLETED)
    def schedule(engine):
        scheduler.step()

    @trainer.on(Events.ITERATION_COMPLETED(every=4))
    def log(engine):
        print(f"iteration {engine.state.iteration} average {engine.state.metrics['average']!r}", flush=True)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        found = evaluator.run(val_loader).metrics
        print(f"epoch {engine.state.epoch} {found}", flush=True)

    stopping = EarlyStopping(3, lambda engine: engine.state.metrics["accuracy"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    if args.save:
        kept = {"model": model, "optimizer": optimizer, "trainer": trainer, "scheduler": scheduler}
        handler = Checkpoint(
            kept,
            DiskSaver("checkpoints", create_dir=True, require_empty=False),
            n_saved=2,
            global_step_transform=global_step_from_engine(trainer),
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    trainer.run(train_loader, max_epochs=4)
    print(f"iterations {trainer.state.iteration} rate {scheduler.get_last_lr()} {trainer.state.metrics}")
    print_digests(idist.get_rank(), model=model.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    idist.initialize("gloo")
    training(idist.get_local_rank())
    idist.finalize()
