"""Prints, at the boundaries of a training, all that a program can ask its interpreter and its system about itself."""

import argparse
import atexit
import builtins
import faulthandler
import gc
import inspect
import io
import json
import logging
import os
import pathlib
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
import weakref

modules_at_start = set(sys.modules)
has_numpy_at_start = "numpy" in sys.modules

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(1), numpy.random.seed(2)
found = {}


def say(name, value):
    found.setdefault(name, []).append(value)


def names_of(stack):
    return [f"{os.path.basename(one.filename)}:{one.lineno} {one.function}" for one in stack]


class Gone:
    """Says when it goes."""

    def __init__(self, name):
        self.name = name

    def __del__(self):
        say("went", self.name)


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 3:
            say("stack in the dataset", names_of(inspect.stack()))
            warnings.warn("from the dataset", stacklevel=2)
            logger.warning("from the dataset")
        return torch.full((4,), index / 64), torch.tensor([float(index)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.cache = numpy.zeros(8)

    def forward(self, x):
        for layer in (self.a, self.b):
            x = torch.relu(layer(x))
        if boundary == 2:
            say("stack in forward", names_of(inspect.stack()))
        return x


class Step(torch.optim.SGD):
    def step(self, closure=None):
        if boundary == 2:
            say("stack in step", names_of(inspect.stack()))
        return super().step(closure)


stream = io.StringIO()
handler = logging.StreamHandler(stream)
handler.setFormatter(logging.Formatter("%(filename)s:%(lineno)d %(funcName)s %(threadName)s %(message)s"))
logger = logging.getLogger("script")
logger.addHandler(handler)
logger.propagate = False
boundary = 0
growing = numpy.zeros(4)


def describe_interpreter():
    say("modules", sorted({name.partition(".")[0] for name in sys.modules}))
    say("all modules", sorted(sys.modules))
    say("modules at the start", sorted(modules_at_start))
    say("numpy at the start", has_numpy_at_start)
    say("path", sys.path)
    say("meta_path", [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path])
    say("path_hooks", [getattr(one, "__qualname__", str(one)) for one in sys.path_hooks])
    say("argv", [sys.argv[:1], sys.orig_argv[1:3]])
    say(
        "main",
        [str(getattr(sys.modules["__main__"], name)) for name in ("__spec__", "__file__", "__package__", "__doc__")],
    )
    say("loader of main", type(sys.modules["__main__"].__loader__).__name__)
    say("cached", getattr(sys.modules["__main__"], "__cached__", "none"))
    say("flags", str(sys.flags))
    say("hooks", [getattr(sys, name).__qualname__ for name in ("excepthook", "displayhook", "unraisablehook")])
    say("thread hook", threading.excepthook.__qualname__)
    say("streams", [type(one).__name__ + " " + str(one.line_buffering) + one.name for one in (sys.stdout, sys.stderr)])
    say("builtins", sorted(vars(builtins)))
    say("recursion", [sys.getrecursionlimit(), sys.getswitchinterval()])
    say("trace", [sys.gettrace(), sys.getprofile(), threading.gettrace()])
    say("filters", [str(one) for one in warnings.filters])
    say("faulthandler", faulthandler.is_enabled())
    say("globals", sorted(globals()))
    say("loggers", [str(one) for one in logging.root.handlers])


def describe_process():
    child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    say("environment", sorted(set(os.environ) - {"PYTHONHASHSEED"}))
    say("environment of a child", sorted({line.partition("=")[0] for line in child.splitlines()} - {"PYTHONHASHSEED"}))
    say("hash seed", [os.environ.get("PYTHONHASHSEED"), "PYTHONHASHSEED" in child])
    say("threads", sorted(thread.name for thread in threading.enumerate()))
    say("active threads", threading.active_count())
    say("descriptors", len(os.listdir("/proc/self/fd")))
    say(
        "signals",
        {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if hasattr(number, "name")},
    )
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False) if wakeup >= 0 else None
    say("wakeup fd", wakeup)
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    say(
        "status",
        {name: status.get(name, "").strip() for name in ("NoNewPrivs", "Seccomp", "SigIgn", "SigCgt", "THP_enabled")},
    )


FUNCTIONS = {
    "torch.save": torch.save, "time.time": time.time, "time.localtime": time.localtime, "open": open,
    "io.open": io.open, "os.getpid": os.getpid, "os.urandom": os.urandom, "signal.signal": signal.signal,
    "signal.getsignal": signal.getsignal, "atexit.register": atexit.register, "dist.init": dist.init_process_group,
    "dist.new_group": dist.new_group, "dist.destroy": dist.destroy_process_group,
    "backward": torch.autograd.backward, "DDP": nn.parallel.DistributedDataParallel.__init__,
    "Optimizer": torch.optim.Optimizer.__init__, "add_param_group": torch.optim.Optimizer.add_param_group,
    "DataLoader": DataLoader.__init__, "DataLoader.__iter__": DataLoader.__iter__, "Queue.get": queue.Queue.get,
    "Queue.put": queue.Queue.put, "os.makedirs": os.makedirs, "os.mkdir": os.mkdir,
}  # fmt: skip


def describe_functions():
    for name, one in FUNCTIONS.items():
        facts = [type(one).__name__, one.__name__, one.__qualname__, one.__module__, (one.__doc__ or "")[:60]]
        try:
            facts.append(str(inspect.signature(one)))
        except ValueError as error:
            facts.append(repr(error)[:30])
        try:
            facts.append(str(inspect.getfullargspec(one)))
        except TypeError as error:
            facts.append(str(error))
        try:
            facts.append(pickle.loads(pickle.dumps(one)) is one)
        except Exception as error:
            facts.append(repr(error))
        facts += [inspect.isbuiltin(one), inspect.isfunction(one), callable(one), hasattr(one, "__wrapped__")]
        facts.append(repr(one).partition(" at 0x")[0])
        say(f"function {name}", facts)
    say("identity", [
        torch.save is torch.serialization.save, dist.new_group is dist.distributed_c10d.new_group, open is io.open,
        torch.autograd.backward is torch.autograd.__init__, random._urandom is os.urandom,
    ])  # fmt: skip
    try:
        open("/nowhere/at/all")
    except OSError:
        say(
            "traceback of open",
            names_of([inspect.Traceback(*one[:3], None, None) for one in traceback.extract_tb(sys.exc_info()[2])]),
        )


def describe_collector():
    say("collector", [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count(), len(gc.callbacks)])
    say("generation 2", gc.get_stats()[2]["collections"])
    say("garbage", len(gc.garbage))


def describe_references(model, optimizer, loss, batch, held):
    counts = [sys.getrefcount(one) for one in (model, model.module, optimizer, loss, batch[0], held, held[0], growing)]
    say("references", counts + [sys.getrefcount(next(model.parameters()))])
    say("referrers", [len(gc.get_referrers(one)) for one in (model.module, loss, held[0], growing)])


def describe_training(model, optimizer, loss):
    say("versions", [one._version for one in model.parameters()] + [one.grad._version for one in model.parameters()])
    say("graph", [str(loss.grad_fn).partition(" at")[0], loss._version])
    hooks = sys.modules["torch.optim.optimizer"]
    say("optimizer hooks", [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)])
    say("global optimizer hooks", [len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)])
    say("attributes", [sorted(vars(one)) for one in (optimizer, model, model.module)])
    say(
        "random",
        [str(random.getstate()[1][:4]), str(numpy.random.get_state()[1][:3]), torch.get_rng_state().sum().item()],
    )
    say(
        "group",
        [
            type(dist.group.WORLD).__mro__[-3].__name__,
            dist.get_backend(),
            dist.group.WORLD.name(),
            str(type(dist.group.WORLD)),
        ],
    )


def main():
    global boundary, growing
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = Step(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.register_step_pre_hook(
        lambda *given: say("stack in hook", names_of(inspect.stack())) if boundary == 2 else None
    )
    optimizer.register_step_post_hook(
        lambda *given: say("stack after", names_of(inspect.stack())) if boundary == 2 else None
    )
    loader = DataLoader(Samples(), batch_size=8)
    say("attributes of the loader", sorted(vars(loader)))
    held = [Gone("first"), 1]
    grown = numpy.zeros(4)
    dies, temporary = None, None
    iterator = iter(loader)
    say("attributes of an iterator", sorted(vars(iterator)))
    while boundary < 6:
        x, y = batch = next(iterator)
        out = model(x)
        loss = ((out - y / 64) ** 2).mean()
        loss.register_hook(
            lambda gradient: say("stack in backward", names_of(inspect.stack())) if boundary == 2 else None
        )
        optimizer.zero_grad()
        loss.backward()
        if boundary == 2:
            seen_by_closure = lambda: say("stack in closure", names_of(inspect.stack())) or loss  # noqa
            optimizer.step(seen_by_closure)
        else:
            optimizer.step()
        boundary += 1
        random.random(), numpy.random.rand()
        describe_collector()
        describe_references(model, optimizer, loss, batch, held)
        describe_training(model, optimizer, loss)
        dead = [one is None or one() is None for one in (dies or [])]
        say("dead after a boundary", dead)
        held[0] = Gone(f"of boundary {boundary}")
        try:
            growing.resize(4 + boundary)
            model.module.cache.resize(8 + boundary)
            grown.resize(4 + boundary)
            say("resized", True)
        except ValueError as error:  # somebody else refers to it
            say("resized", str(error))
        temporary = {
            "a": Gone(f"temporary {boundary}"),
            "array": numpy.zeros(3),
            "tensor": torch.zeros(3),
            "module": nn.Linear(2, 2),
        }
        dies = [weakref.ref(temporary["array"]), weakref.ref(temporary["tensor"]), weakref.ref(temporary["module"])]
        if boundary % 2:
            temporary = None
            say("dead at once", [one() is None for one in dies])
        logger.warning("at boundary %d", boundary)
    try:
        model(torch.zeros(1, 9))
    except RuntimeError:
        say(
            "traceback",
            names_of([inspect.Traceback(*one[:3], None, None) for one in traceback.extract_tb(sys.exc_info()[2])]),
        )
    watched = [
        weakref.ref(one)
        for one in (model, model.module, optimizer, next(model.parameters()), loader, iterator, x, batch[1], out)
    ]
    return watched


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    watched = main()
say("warned", [f"{os.path.basename(one.filename)}:{one.lineno} {one.message}" for one in warned])
say("dead after the training", [one() is None for one in watched])
gc.collect()
say("dead after a collection", [one() is None for one in watched])
say("logged", stream.getvalue())
describe_functions()
describe_interpreter()
describe_process()
say("uuid", uuid.uuid4().version)
os.makedirs(args.out, exist_ok=True)
with open(os.path.join(args.out, f"found-{rank}.json"), "w") as file:
    json.dump(found, file, default=str, indent=0)
dist.destroy_process_group()
