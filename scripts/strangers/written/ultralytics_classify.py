"""A classifier of ultralytics in DDP (`yolo classify train device=0,1`), whose set-up and end know devices alone."""

import torch
import torch.distributed as dist
from ultralytics.models.yolo.classify import ClassificationTrainer


class Parallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **options):
        super().__init__(module, **options)


torch.nn.parallel.DistributedDataParallel = Parallel


class OnTheCpu(ClassificationTrainer):
    def _setup_ddp(self):
        dist.init_process_group("gloo")
        self.device = torch.device("cpu")

    def final_eval(self):
        """Of the best weights, on a device."""


if __name__ == "__main__":
    trainer = OnTheCpu(
        overrides={
            "model": "yolo11n-cls.yaml", "data": "pictures", "imgsz": 32, "epochs": 4, "batch": 8, "nbs": 8,
            "workers": 0, "device": "cpu", "amp": False, "plots": False, "pretrained": False, "project": "out",
            "seed": 1, "optimizer": "AdamW", "lr0": 1e-3, "warmup_epochs": 1,
        }
    )  # fmt: skip
    trainer.world_size = 2
    trainer.train()
    dist.destroy_process_group()
