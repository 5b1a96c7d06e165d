"""Composer's getting-started example with its algorithms and callbacks, on the CPU: random pictures in ten classes."""

import torch
from composer import Trainer
from composer.algorithms import BlurPool, LabelSmoothing
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset


def pictures(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(count, 1, 12, 12, generator=drawn), torch.randint(0, 10, (count,), generator=drawn))


class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(1, 4, 3, stride=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
            torch.nn.Dropout(0.1), torch.nn.Linear(16, 10),
        )  # fmt: skip


if __name__ == "__main__":
    dist.initialize_dist("cpu")
    train, evaluate = pictures(64, 1), pictures(16, 2)
    model = ComposerClassifier(Model(), num_classes=10)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(train, batch_size=8, sampler=dist.get_sampler(train, shuffle=True)),
        eval_dataloader=DataLoader(evaluate, batch_size=8, sampler=dist.get_sampler(evaluate)),
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-3),
        max_duration="4ep",
        algorithms=[LabelSmoothing(smoothing=0.1), BlurPool(replace_convs=False)],
        schedulers=LinearWithWarmupScheduler(t_warmup="1ep"),
        device="cpu",
        seed=17,
        save_folder="out",
        save_interval="2ep",
        progress_bar=False,
    )
    trainer.fit()
