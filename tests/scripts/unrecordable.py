"""Training beside objects that no record holds, as many programs have them; small, with DDP.

torchrun --nproc-per-node 2 unrecordable.py --out DIR --kind KIND

lazy      a package that imports its parts when they are first used, and remembers them
traced    a model made by torch.jit.trace, for validation
scale     a generator expression says by how much each step's loss is scaled: a replacement has another place in it
"""

import importlib
import types

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 16


class LazyPackage(types.ModuleType):
    """As large libraries have them: a part is imported at its first use."""

    def __init__(self, name, parts):
        super().__init__(name)
        self.__path__ = []
        self._parts = parts
        self._loaded = {}

    def __getattr__(self, name):
        if name not in self._parts:
            raise AttributeError(name)
        self._loaded[name] = importlib.import_module(self._parts[name])
        return self._loaded[name]


class Registry(dict):
    """Imports what is asked for."""

    def __init__(self, names):
        self.names = names
        self.modules = {}

    def __getitem__(self, key):
        if key not in self.modules:
            self.modules[key] = importlib.import_module(self.names[key])
        return self.modules[key]

    def __iter__(self):
        raise RuntimeError("somebody iterates over the registry")


library = LazyPackage("library", {"colors": "colorsys", "calendars": "calendar"})
registry = Registry({"sounds": "chunk", "plists": "plistlib"})


def main():
    args = arguments(kind="")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    scales = (1 + 0.1 * (n % 7) for n in range(10**6))
    traced = torch.jit.trace(net.eval(), torch.zeros(1, 8)) if args.kind == "traced" else None
    net.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if args.kind == "scale":
            loss = loss * next(scales)
        loss.backward()
        optimizer.step()
        if args.kind == "lazy" and step == 4:
            assert library.colors.rgb_to_hls(0, 0, 0) and registry["plists"]
        if traced is not None and step % 5 == 3:
            print(f"[rank {rank}] validation {traced(torch.ones(1, 8)).item()!r}")
        print(f"[rank {rank}] step {step} loss {loss.item()!r}")
    finish(net.parameters(), args.out, net.state_dict())


if __name__ == "__main__":
    main()
