"""Everything that ttprun changes in the user's process: one table, printed by `ttprun explain`, and how it is applied.

The rows are applied as soon as the script has imported torch, never by importing torch ourselves. If an attribute is
missing (another version of torch), that protection is off, and this is reported once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ttprun.capture import PATCHES as OF_CAPTURE
from ttprun.device.device_errors import VARIABLES
from ttprun.groups import PATCHES as OF_GROUPS
from ttprun.introspect.patching import Patch, after_import, replace

__all__ = ["ALSO", "PATCHES", "Change", "Patch"]


PATCHES: tuple[Patch, ...] = (
    *OF_GROUPS,
    Patch(
        "torch.autograd",
        "backward",
        "rank.proof:wrap_backward",
        "to compare a replacement's loss and gradients with those of the lost rank",
    ),
    Patch(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.__init__",
        "tensors.optimizer_registry:wrap_ddp_init",
        "to give a replacement the same order of gradient buckets",
    ),
    Patch(
        "torch.distributed.fsdp._flat_param",
        "FlatParamHandle.__init__",
        "introspect.model_tensors:wrap_init",
        "to know which part of FSDP1's flat parameters is whose",
        "imported",
    ),
    Patch(
        "torch.distributed.algorithms.join",
        "Join.__enter__",
        "rank.step.special_steps:wrap_join",
        "to know that ranks will take different numbers of steps: none is replaced from then on",
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.__init__",
        "tensors.optimizer_registry:wrap_optimizer_init",
        "to know what the optimizers update; a global hook marks each step",
        "always",
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.add_param_group",
        "tensors.optimizer_registry:wrap_add_param_group",
        "to report parameters that are added during the training, which a replay would lack",
    ),
    Patch(
        "multiprocessing.util",
        "spawnv_passfds",
        "introspect.children:wrap_spawnv_passfds",
        "multiprocessing's resource tracker outlives a killed rank by a moment, to remove its semaphores",
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler._maybe_opt_step",
        "rank.step.special_steps:wrap_maybe_opt_step",
        "to keep what a step that is left out has reduced; in a replay, to leave out the lost rank's, and no others",
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.step",
        "rank.step.special_steps:wrap_step",
        "in a replay, to know which scaler takes a step",
        "replay",
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.update",
        "rank.step.special_steps:wrap_update",
        "in a replay, to do nothing after a loop of steps that was skipped",
        "replay",
    ),
    Patch(
        "atexit",
        "register",
        "rank.bootstrap.reset:wrap_register",
        "to unregister the script's functions before it is run again",
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "_process_group_name",
        "rank.bootstrap.hooks:wrap_process_group_name",
        "with --mindio only, to give a group made during a repair the same name in all ranks",
        "mindio",
    ),
    Patch(
        "torch.utils.data._utils.signal_handling",
        "_error_if_any_worker_fails",
        "rank.held_signals:wrap_error_if_any_worker_fails",
        "to finish saving when a DataLoader worker dies of a signal sent to the whole job",
    ),
    Patch(
        "signal",
        "signal",
        "rank.held_signals:wrap_signal",
        "no handler runs inside our code, but at its end; and a rank that gets SIGTERM or SIGUSR1 with the launcher "
        "lives until the state is saved: the script sees the default handler",
        "first",
    ),
    Patch(
        "signal",
        "getsignal",
        "rank.held_signals:wrap_getsignal",
        "to show the script its own handlers",
        "first",
    ),
    *OF_CAPTURE,
)


@dataclass(frozen=True)
class Change:
    """A change other than a replaced attribute; for `ttprun explain`."""

    module: str
    attribute: str
    why: str


ALSO: tuple[Change, ...] = (
    Change("datetime", "datetime.now, utcnow", "as time.time; restored at the first step"),
    Change(
        "tensorboard", "EventFileWriter.add_event", "each event is counted, to write it once, to the lost rank's file"
    ),
    Change("lightning", "CSVLogger's _ExperimentWriter.save", "rows are counted, to write each once"),
    Change("lightning", "TorchCheckpointIO.save_checkpoint, remove_checkpoint", "in a replay, to do nothing"),
    Change(
        "lightning",
        "_EvaluationLoop.run, teardown",
        "when it is over, its iterators are dropped at once rather than by the next one, which a replay may not reach",
    ),
    Change("torch.optim", "global step hooks", "to write a record before each optimizer step, and to commit it"),
    Change(
        "torch.nn",
        "global forward hook",
        "in a run resumed with other ranks or arguments, up to its first step: to note what the setup has left",
    ),
    Change("torch._dynamo", "trace_rules", "torch.compile does not trace our functions; only if the script uses it"),
    Change("sys", "stdout, stderr", "lines are noted, to print each once"),
    Change(
        "sys",
        "excepthook",
        "to report to the agent that the script itself has failed, or to run it again; and to write the traceback of a "
        "Ctrl-C at the launcher to a file rather than to the terminal",
    ),
    Change(
        "atexit",
        "a handler",
        "after all of the script's: the threads of its process groups end before the interpreter does; otherwise they "
        "sometimes abort it",
    ),
    Change(
        "sys",
        "meta_path, path_hooks",
        "the user's modules are compiled with their for loops followed, by functions in builtins (__ttprun_loop__ ...)",
    ),
    Change(
        "str, bytes",
        "hashes",
        "the hash seed is the same in all ranks, unless PYTHONHASHSEED gives one: a replacement iterates over a set of "
        "str in the lost rank's order",
    ),
    Change(
        "os",
        "environ",
        f"{', '.join(f'{name}={value}' for name, value in VARIABLES.items())}, from the start of a rank's Python: "
        "otherwise torch and torch_npu end the ranks that a recovery needs when an operation fails",
    ),
    Change("gc", "freeze", "in a replacement: torch's own objects are left out of collections, to share their memory"),
    Change(
        "os",
        "environ",
        "_TTPRUN_AGENT_PID: a rank started by a wrapper of yours finds its launcher; _TTPRUN_RUN_DIR: what is left of "
        "a job is found and ended. Others are gone before the script starts",
    ),
    Change(
        "threading",
        "four threads",
        "ttprun-heartbeat: whether the main thread runs or hangs; ttprun-channel: the launcher's messages; "
        "ttprun-recovery: repairs; ttprun-signals: signals to the whole job",
    ),
    Change(
        "resource", "RLIMIT_NOFILE", "during a repair the soft limit is the hard one: it needs some files of its own"
    ),
    Change("faulthandler", "enable, register", "to get the Python stack of a rank that hangs or crashes"),
    Change(
        "os",
        "fork",
        "a child forked by the main thread (a DataLoader worker) ends with its rank, and does not collect its garbage",
    ),
    Change(
        "os, shutil",
        "stat, access, listdir, scandir, mkdir, open, remove, rename, rmtree, ...",
        "the answers that the user's own code gets are kept, to give a replacement the same ones; in a replay its "
        "changes to files are skipped",
    ),
)


def apply_all(with_replay: bool) -> list[str]:
    """Apply what a rank needs after torch is imported; returns the attributes that this version of torch lacks."""
    _follow_imports()
    return _apply("first", "early", "script", "always", *(["replay"] if with_replay else []))


def apply_early(is_mindio: bool) -> list[str]:
    """Apply what must be in place before the script starts; returns what is missing."""
    return _apply("first", *([] if is_mindio else ["early"]))


def apply_for_frameworks() -> list[str]:
    """Apply what a rank with --mindio needs, where nothing is recorded or replayed; returns what is missing."""
    _follow_imports()
    return _apply("first", "always", "mindio")


def _follow_imports() -> None:
    for module in {patch.module for patch in PATCHES if patch.where == "imported"}:
        after_import(module, functools.partial(_apply_to, module))


def _apply_to(module: str) -> None:
    # What is missing is not reported here: who needs it finds it missing, and says so.
    replace(patch for patch in PATCHES if patch.where == "imported" and patch.module == module)


def _apply(*wheres: str) -> list[str]:
    return replace(patch for patch in PATCHES if patch.where in wheres)
