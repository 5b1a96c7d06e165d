"""Everything that ttprun changes in the user's process: one table, printed by `ttprun explain`.

The rows are applied as soon as the script has imported torch, never by importing torch ourselves. If an attribute is
not there (another version of torch), that protection is off, and this is said once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ttprun.rank import fail_open


@dataclass(frozen=True)
class Patch:
    """One change.

    module, attribute  what is changed ("a.b" for a class's method)
    ours               "module:function"; given the original, it returns what takes its place
    why                one phrase
    is_early           applied before the script starts, and not only when it has imported torch
    is_for_replay      applied only before a replay
    is_for_frameworks  applied where a framework recovers by callbacks (--mindio), and no script is replayed
    is_for_scripts     applied everywhere else
    """

    module: str
    attribute: str
    ours: str
    why: str
    is_for_replay: bool = False
    is_early: bool = False
    is_for_frameworks: bool = False
    is_for_scripts: bool = True


_CLOCKS = {
    "time": "wrap_time",
    "time_ns": "wrap_time_ns",
    "localtime": "wrap_of_seconds",
    "gmtime": "wrap_of_seconds",
    "ctime": "wrap_of_seconds",
    "strftime": "wrap_strftime",
    "asctime": "wrap_asctime",
}
PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.distributed.distributed_c10d",
        "init_process_group",
        "ttprun.rank.comm.groups:wrap_init_process_group",
        "to give the script a process group whose connection can be replaced",
        is_for_frameworks=True,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "new_group",
        "ttprun.rank.comm.groups:wrap_new_group",
        "the same for further groups",
        is_for_frameworks=True,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "destroy_process_group",
        "ttprun.rank.comm.groups:wrap_destroy_process_group",
        "to forget a group with the script",
        is_for_frameworks=True,
    ),
    Patch(
        "torch.autograd",
        "backward",
        "ttprun.rank.checks.proof:wrap_backward",
        "to compare a replacement's loss and gradients with those of the lost rank",
    ),
    Patch(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.__init__",
        "ttprun.rank.weights.optimizer_registry:wrap_ddp_init",
        "to give a replacement the same order of gradient buckets",
    ),
    Patch(
        "torch._jit_internal",
        "_extract_tensors",
        "ttprun.rank.comm.work:wrap_extract_tensors",
        "DDP takes results out of our futures without pickling them",
    ),
    Patch(
        "torch.distributed.algorithms.join",
        "Join.__enter__",
        "ttprun.rank.step.step_hooks:wrap_join",
        "to know that ranks will take different numbers of steps: none is replaced from then on",
    ),
    Patch(
        "torch.autograd.graph",
        "saved_tensors_hooks.__enter__",
        "ttprun.rank.values.histories:wrap_saved_tensors_hooks",
        "before torch 2.13, to leave alone what the script packs itself when a tensor's history is looked at",
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.__init__",
        "ttprun.rank.weights.optimizer_registry:wrap_optimizer_init",
        "to know what the optimizers update; a global hook marks each step",
        is_for_frameworks=True,
    ),
    Patch(
        "torch.utils.data.dataloader",
        "DataLoader.__init__",
        "ttprun.rank.data.loaders:wrap_init",
        "to name a loader by its place in the script",
    ),
    Patch(
        "torch.utils.data.dataloader",
        "DataLoader.__iter__",
        "ttprun.rank.data.loaders:wrap_iter",
        "to record where its iterators stand",
    ),
    Patch(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter.__next__",
        "ttprun.rank.data.loaders:wrap_next",
        "to know the newest batch, and when an iterator has ended",
    ),
    Patch(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter.__next__",
        "ttprun.rank.data.loaders:wrap_next_in_replay",
        "in a replay, to hand out nothing but placeholders for batches that were used",
        is_for_replay=True,
    ),
    Patch(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter._reset",
        "ttprun.rank.data.loaders:wrap_reset",
        "to know when a persistent iterator begins again",
    ),
    Patch(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter._next_index",
        "ttprun.rank.data.loaders:wrap_next_index",
        "in a replay, to pass over batches that were used",
        is_for_replay=True,
    ),
    Patch(
        "torch.utils.data._utils.worker",
        "_worker_loop",
        "ttprun.rank.data.workers:wrap_worker_loop",
        "to keep the random states of DataLoader workers",
    ),
    Patch(
        "torch.serialization",
        "save",
        "ttprun.rank.effects.files:wrap_save",
        "in a replay, to save nothing",
    ),
    Patch(
        "atexit",
        "register",
        "ttprun.rank.bootstrap.reset:wrap_register",
        "to take the script's functions off if it is run again",
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "_process_group_name",
        "ttprun.rank.bootstrap.framework_hooks:wrap_process_group_name",
        "with --mindio only, to give a group that is made in a repair the same name in all ranks",
        is_for_frameworks=True,
        is_for_scripts=False,
    ),
    Patch(
        "torch.utils.data._utils.signal_handling",
        "_error_if_any_worker_fails",
        "ttprun.rank.process.held_signals:wrap_error_if_any_worker_fails",
        "the end of a worker that was signalled with the whole job does not break off what is to be saved",
    ),
    Patch(
        "signal",
        "signal",
        "ttprun.rank.process.held_signals:wrap_signal",
        "a rank that gets SIGTERM or SIGUSR1 together with the launcher lives till the state is saved; the script sees "
        "the default handler",
        is_for_frameworks=True,
    ),
    Patch(
        "signal",
        "getsignal",
        "ttprun.rank.process.held_signals:wrap_getsignal",
        "the same",
        is_for_frameworks=True,
    ),
    *(
        Patch(
            "time",
            name,
            f"ttprun.rank.effects.origins:{ours}",
            "up to the first step, to give a replacement's set-up the same time: it names the same folders",
            is_early=True,
        )
        for name, ours in _CLOCKS.items()
    ),
    Patch(
        "os",
        "getpid",
        "ttprun.rank.effects.origins:wrap_getpid",
        "the same for the names of TensorBoard's files; other callers get the process's own",
        is_early=True,
    ),
    Patch(
        "os",
        "urandom",
        "ttprun.rank.effects.os_entropy:wrap_urandom",
        "the same for uuids; and to notice randomness that cannot be replayed",
        is_early=True,
    ),
    Patch(
        "random",
        "_urandom",
        "ttprun.rank.effects.os_entropy:wrap_urandom",
        "the same for random.SystemRandom",
        is_early=True,
    ),
    Patch("queue", "Queue.get", "ttprun.rank.values.streams:wrap_get", "to know a log's queue from one of data"),
    Patch("queue", "Queue.put", "ttprun.rank.values.streams:wrap_put", "the same"),
    Patch(
        "builtins",
        "open",
        "ttprun.rank.effects.files:wrap_open",
        "to know where the files stand that the script writes",
    ),
    Patch("io", "open", "ttprun.rank.effects.files:wrap_open", "the same for pathlib"),
)


@dataclass(frozen=True)
class Change:
    """A change that is no replaced attribute; for `ttprun explain`."""

    module: str
    attribute: str
    why: str


ALSO: tuple[Change, ...] = (
    Change("datetime", "datetime.now, utcnow", "as time.time; put back at the first step"),
    Change(
        "tensorboard",
        "EventFileWriter.add_event",
        "each event is counted, so that it comes out once, in the lost rank's file",
    ),
    Change("torch.optim", "global step hooks", "to write a record in front of each optimizer step, and to commit it"),
    Change(
        "torch.nn",
        "global forward hook",
        "in a run that goes on with other ranks or arguments, up to its first step: to note what the set-up has left",
    ),
    Change("torch._dynamo", "trace_rules", "torch.compile does not trace our functions; only if the script uses it"),
    Change("sys", "stdout, stderr", "lines are counted, so that each comes out once"),
    Change(
        "sys",
        "excepthook",
        "to tell the agent that the script itself has failed, or to run it again; and to keep a Ctrl-C at the "
        "launcher from filling the terminal: its traceback goes to a file",
    ),
    Change(
        "atexit",
        "a handler",
        "behind all of the script's: the threads of its process groups end before the interpreter does, which abort it "
        "otherwise, now and then",
    ),
    Change(
        "sys",
        "meta_path, path_hooks",
        "the user's modules are compiled with their for loops followed (a variable __ttp_loop_LINE_COLUMN__ for each)",
    ),
    Change(
        "numpy, torch",
        "memory of large arrays and tensors",
        "the kernel, where it can, tells what was written to those in the script's variables (userfaultfd): a page's "
        "first write behind a step takes a microsecond longer",
    ),
    Change(
        "str, bytes",
        "hashes",
        "their seed is the same in all ranks, unless PYTHONHASHSEED gives one: so a replacement goes through a set of "
        "texts in the lost rank's order",
    ),
    Change(
        "gc", "freeze", "what torch is made of is left out of collections, so that forgetting a run takes no second"
    ),
    Change("threading", "a thread", "a heartbeat, which tells a main thread that runs from one that hangs"),
    Change("faulthandler", "enable, register", "to get the Python stack of a rank that hangs or crashes"),
    Change(
        "os",
        "fork",
        "a child forked by the main thread (a DataLoader worker) ends with its rank; garbage is left to the rank",
    ),
    Change(
        "os, shutil", "remove, rename, rmtree, ...", "in a replay, what the user's own code does to files is left out"
    ),
)


def replacement_for(patch: Patch, original: Any) -> Any:
    """What takes the original's place, and does as the original if ours fails; its `__wrapped__` is the original."""
    module, _, name = patch.ours.partition(":")
    wrap: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    ours = fail_open.guard(f"{patch.module}.{patch.attribute}", original, wrap)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(original, attribute):
            setattr(ours, attribute, getattr(original, attribute))
    ours.__wrapped__ = original
    return ours


_done: set[Patch] = set()


def apply_all(with_replay: bool) -> list[str]:
    """Apply the table, torch being imported, but for what has been applied; returns what could not be applied."""
    return _apply(patch for patch in PATCHES if patch.is_for_scripts and (with_replay or not patch.is_for_replay))


def apply_early() -> list[str]:
    """What must be there before the script starts; returns what could not be applied."""
    return _apply(patch for patch in PATCHES if patch.is_early)


def apply_for_frameworks() -> list[str]:
    """The same where nothing of the script is recorded or replayed: of the table, what such a rank needs."""
    return _apply(patch for patch in PATCHES if patch.is_for_frameworks)


def _apply(patches: Iterable[Patch]) -> list[str]:
    """Apply some rows, but for those that have been applied; returns what could not be applied."""
    missing = []
    changed: dict[int, tuple[str, Any]] = {}
    for patch in patches:
        if patch in _done:
            continue
        _done.add(patch)
        *path, name = patch.attribute.split(".")
        try:
            owner: Any = importlib.import_module(patch.module)
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, name)
        except (ImportError, AttributeError):
            missing.append(f"{patch.module}.{patch.attribute}")
            continue
        ours = replacement_for(patch, original)
        setattr(owner, name, ours)
        if not path:
            changed[id(original)] = (patch.module.partition(".")[0], ours)
    _replace_imported_names(changed)
    return missing


def _replace_imported_names(changed: dict[int, tuple[str, Any]]) -> None:
    """Change the further names of functions, too: torch.distributed.init_process_group, and others' imports of it.

    A package that was imported together with torch, or that has imported torch before we came, may hold one already.

    changed   by the id of the original: (its package, ours); names in other packages are changed of torch's alone
    """
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        names = getattr(module, "__dict__", None)
        if package == "ttprun" or type(names) is not dict:
            continue
        for held, value in list(names.items()):
            known = changed.get(id(value))
            if known is not None and known[0] in (package, "torch"):
                names[held] = known[1]
