"""Trains while every place that can be looked at holds an object that notices each look; prints what was noticed."""

import argparse
import os

import numpy
import torch
import torch.distributed as dist
import watchful
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from watchful import everything, kind, one

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
globals().update(everything("global"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.extra = one("module.attribute")
        self.extras = [one("module.list"), kind(dict, "module.dict_kind")({"a": 1})]

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Samples(Dataset):
    def __init__(self):
        self.held = everything("dataset")
        self.extra = one("dataset.attribute")

    def __len__(self):
        watchful.note("dataset", "__len__")
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64), torch.tensor([float(index)])


class Order(Sampler):
    def __init__(self):
        self.held = everything("sampler")

    def __len__(self):
        watchful.note("sampler", "__len__")
        return 64

    def __iter__(self):
        watchful.note("sampler", "__iter__")
        yield from torch.randperm(64).tolist()


class Batch(kind(dict, "batch")):
    pass


def collate(items):
    batch = Batch(x=torch.stack([x for x, _ in items]), y=torch.stack([y for _, y in items]), label=one("batch.item"))
    return batch


class WatchfulOptimizer(torch.optim.SGD):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.held = one("optimizer.attribute")

    def state_dict(self):
        watchful.note("optimizer", "state_dict")
        return super().state_dict()


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        watchful.note("scheduler", "state_dict")
        return super().state_dict()


class WatchfulNet(nn.Module):
    """Its methods are the script's."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.statistics = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("kept", torch.zeros(2))

    def __getattr__(self, name):
        watchful.note("module of the script's", f"__getattr__ {name}")
        return super().__getattr__(name)

    def state_dict(self, *given, **named):
        watchful.note("module of the script's", "state_dict")
        return super().state_dict(*given, **named)

    def named_parameters(self, *given, **named):
        watchful.note("module of the script's", "named_parameters")
        return super().named_parameters(*given, **named)

    def named_modules(self, *given, **named):
        watchful.note("module of the script's", "named_modules")
        return super().named_modules(*given, **named)

    def named_buffers(self, *given, **named):
        watchful.note("module of the script's", "named_buffers")
        return super().named_buffers(*given, **named)

    def __len__(self):
        watchful.note("module of the script's", "__len__")
        return 0

    def __iter__(self):
        watchful.note("module of the script's", "__iter__")
        return iter(())

    def get_extra_state(self):
        watchful.note("module of the script's", "get_extra_state")
        return {}

    def set_extra_state(self, state):
        pass


class WatchfulTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        watchful.note("tensor of the script's", str(getattr(function, "__qualname__", function)))
        return super().__torch_function__(function, types, given, named or {})


class WatchfulParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        watchful.note("parameter of the script's", str(getattr(function, "__qualname__", function)))
        return super().__torch_function__(function, types, given, named or {})


class WatchfulArray(numpy.ndarray):
    def __getattribute__(self, name):
        watchful.note("array of the script's", name)
        return super().__getattribute__(name)

    def __array_finalize__(self, other):
        watchful.note("array of the script's", "__array_finalize__")


def main():
    locals_of_function = everything("local")  # noqa: F841
    direct = one("local")
    in_list = [one("local list")]
    list_kind = kind(list, "local list_kind")([1, torch.zeros(1)])
    dict_kind = kind(dict, "local dict_kind")(a=1, b=torch.zeros(1))
    tuple_kind = kind(tuple, "local tuple_kind")((1, torch.zeros(1)))
    other_net = WatchfulNet()
    tensor = torch.zeros(4).as_subclass(WatchfulTensor)
    in_tensors = [torch.zeros(4).as_subclass(WatchfulTensor)]
    array = numpy.zeros(4).view(WatchfulArray)
    objects = numpy.array([one("array of objects"), 1], dtype=object)
    model = nn.parallel.DistributedDataParallel(Net())
    own = WatchfulParameter(torch.zeros(3))
    optimizer = WatchfulOptimizer(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.add_param_group({"params": [own], "extra": one("param group")})
    optimizer.param_groups[0]["kinds"] = kind(dict, "param group.dict_kind")({"a": 1})
    schedule = Schedule(optimizer, lambda epoch: 0.9**epoch)
    schedule.extra = one("scheduler.attribute")
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Samples(), batch_size=8, sampler=Order(), collate_fn=collate, generator=generator)
    shuffled = DataLoader(Samples(), batch_size=16, shuffle=True)
    losses, done = [], 0
    looks = 0  # at the loader that shuffles
    while done < args.steps:
        for batch in loader:
            x, y = dict.__getitem__(batch, "x"), dict.__getitem__(batch, "y")
            loss = ((model(x) - y / 64) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()

            def closure():
                return loss  # noqa: B023

            optimizer.step(closure if done % 2 else None)
            schedule.step()
            losses.append(loss.item())
            done += 1
            if done >= args.steps:
                break
        looks += len([0 for _ in shuffled])
    seen = dict(watchful.seen)  # before these objects go, which they notice, too
    keep = direct, in_list, list_kind, dict_kind, tuple_kind, other_net, tensor, in_tensors, array, objects
    return losses, looks, seen, keep


losses, looks, seen, _ = main()
for what in sorted(seen):
    print(f"[rank {rank}] noticed {what}: {seen[what]}")
print(f"[rank {rank}] {looks} batches, losses {losses!r}")
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(torch.tensor(losses), os.path.join(args.out, "final.pt"))
dist.destroy_process_group()
