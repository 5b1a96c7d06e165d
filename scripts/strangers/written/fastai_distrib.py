"""fastai's Learner with `distrib_ctx`, MixUp and a schedule, for a CPU.

fastai broadcasts the order of the samples as a CUDA tensor; `on_the_cpu` stands in for that, and synchronized batch
norm, which needs a GPU, is off. Argument: `wrapped` for torch's AdamW in place of fastai's own Adam.
"""

import sys

import fastai.distributed as distributed
import fastai.vision.all as vision
import torch
from fastai.vision.models.xresnet import xresnet18


def on_the_cpu(self, order, rank):
    order = torch.tensor(list(order))
    torch.distributed.broadcast(order, rank)
    return order.tolist()


distributed.DistributedDL._broadcast = on_the_cpu
vision.set_seed(1)
loaders = vision.ImageDataLoaders.from_folder(
    "pictures", valid="val", item_tfms=[vision.RandomResizedCrop(32), vision.FlipItem(0.5)], bs=4, num_workers=0
)
wrapped = vision.partial(vision.OptimWrapper, opt=torch.optim.AdamW)
learner = vision.Learner(
    loaders, xresnet18(n_out=2), metrics=vision.accuracy, opt_func=wrapped if "wrapped" in sys.argv else vision.Adam
)
with learner.distrib_ctx(sync_bn=False):
    learner.fit_flat_cos(4, 1e-3, cbs=vision.MixUp(0.1))
