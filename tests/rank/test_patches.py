"""What is changed in the user's process: one test a patch, and what happens where an attribute is missing."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.data.dataloader as torch_dataloader
from torch.utils.data import DataLoader

from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from tests.rank.scripts import run_under_shim
from ttprun.introspect.patching import replacement_for
from ttprun.protocol import from_rank
from ttprun.rank.bootstrap import patch_table
from ttprun.rank.bootstrap.patch_table import PATCHES, Patch

BY_NAME = {f"{patch.module}.{patch.attribute}": patch for patch in PATCHES}


class Original:
    """Stands for what is patched: notes its calls, gives something back."""

    def __init__(self, result: Any, fails: bool = False) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result, self.fails = result, fails
        self.__name__ = "original"
        self.__doc__ = "What the user reads."

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if self.fails:
            raise ValueError("the user's")
        return self.result


class Thing:
    """Stands for the object whose method is patched."""

    _enable = True
    _num_yielded = 0
    generator = None
    sampler = None
    num_workers = 0
    _all_gather_result = None


Call = tuple[tuple[Any, ...], dict[str, Any]]
LINEAR = torch.nn.Linear(1, 1)
THING = Thing()
CALLS: dict[str, Call] = {
    "torch.distributed.distributed_c10d.init_process_group": (("mpi", None), {"rank": 0}),
    "torch.distributed.distributed_c10d.new_group": (([0], None, "mpi"), {"pg_options": None}),
    "torch.distributed.distributed_c10d.destroy_process_group": ((None,), {}),
    "torch.distributed.distributed_c10d._process_group_name": (([0, 1], True), {}),
    "torch.nn.parallel.distributed.DistributedDataParallel.__init__": ((THING, LINEAR), {"bucket_cap_mb": 1}),
    "torch.nn.parallel.distributed.DistributedDataParallel._get_ddp_logging_data": ((THING,), {}),
    "torch.distributed.fsdp._flat_param.FlatParamHandle.__init__": ((THING, [1, 2]), {"offload_params": False}),
    "threading.Thread.start": ((threading.Thread(),), {}),
    "multiprocessing.util.spawnv_passfds": (("/bin/true", ["true"], ()), {}),
    **{
        f"torch.distributed.checkpoint._async_{kind}_executor._{name}BasedAsyncCheckpointExecutor.execute_save": (
            (Thing(), {}),
            {"checkpoint_id": "here"},
        )
        for kind, name in (("thread", "Thread"), ("process", "Process"))
    },
    "torch._jit_internal._extract_tensors": (([LINEAR.weight, 1],), {}),
    "torch.distributed.algorithms.join.Join.__enter__": ((THING,), {}),
    "torch.autograd.graph.saved_tensors_hooks.__enter__": ((THING,), {}),
    "torch.optim.optimizer.Optimizer.__init__": ((THING, [1, 2]), {"defaults": {}}),
    "torch.optim.optimizer.Optimizer.add_param_group": ((THING, {"params": [1, 2]}), {}),
    "torch.utils.data.dataloader.DataLoader.__init__": ((THING, [1, 2]), {"batch_size": 3}),
    "torch.utils.data.dataloader.DataLoader.__iter__": ((THING,), {}),
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": ((THING,), {}),
    "torch.utils.data.dataloader._BaseDataLoaderIter._reset": ((THING, "loader", True), {}),
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index": ((THING,), {}),
    "torch.utils.data.dataloader._BaseDataLoaderIter.__init__": ((THING, "loader"), {}),
    **{
        f"torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader.{method}": ((THING,), {})
        for method in ("__init__", "__iter__")
    },
    "torch.serialization.save": (({"weights": 1}, "file"), {"pickle_protocol": 2}),
    "safetensors.serialize_file": (({"weights": 1}, "file"), {"metadata": None}),
    "torch.distributed.distributed_c10d.batch_isend_irecv": (([],), {}),
    "torch.distributed.distributed_c10d.split_group": ((THING, [[0]]), {"group_desc": "half"}),
    **{
        f"torch.distributed.fsdp._fully_shard.{method}": ((THING,), {})
        for method in (
            "_fsdp_param_group.FSDPParamGroup.wait_for_unshard",
            "_fsdp_param_group.FSDPParamGroup.post_backward",
            "_fsdp_state.FSDPState._root_post_backward_final_callback",
        )
    },
    "torch.cuda.synchronize": ((0,), {}),
    "torch.accelerator.synchronize": ((0,), {}),
    "torch_npu.npu.synchronize": ((0,), {}),
    "torch.distributed._symmetric_memory.rendezvous": ((THING,), {"group": "0"}),
    "torch.cuda.graphs.CUDAGraph.capture_begin": ((THING,), {"pool": None}),
    "torch_npu.npu.NPUGraph.capture_begin": ((THING,), {"pool": None}),
    "torch.amp.grad_scaler.GradScaler._maybe_opt_step": ((THING, THING, {}), {"closure": None}),
    "torch.amp.grad_scaler.GradScaler.update": ((THING,), {"new_scale": 2.0}),
    "torch.amp.grad_scaler.GradScaler.step": ((THING, THING), {"closure": None}),
    "torch.autograd.backward": ((THING,), {"retain_graph": True}),
    "atexit.register": ((print,), {"sep": ""}),
    "torch.utils.data._utils.signal_handling._error_if_any_worker_fails": ((), {}),
    "signal.signal": ((signal.SIGUSR2, signal.SIG_IGN), {}),
    "signal.getsignal": ((signal.SIGUSR2,), {}),
    "os.urandom": ((4,), {}),
    "os.getpid": ((), {}),
    "time.time": ((), {}),
    "time.time_ns": ((), {}),
    "time.localtime": ((0.0,), {}),
    "time.gmtime": ((0.0,), {}),
    "time.ctime": ((0.0,), {}),
    "time.strftime": (("%Y", (0,) * 9), {}),
    "time.asctime": (((0,) * 9,), {}),
    "random._urandom": ((4,), {}),
    "queue.Queue.get": ((THING,), {"timeout": 3}),
    "queue.Queue.put": ((THING, 7), {"timeout": 3}),
}


ALL_CALLS = CALLS | {"builtins.open": (("/dev/null",), {"mode": "w"}), "io.open": (("/dev/null",), {})}
RETURNS_NOTHING = ("__init__", "_reset", "Thread.start")


@pytest.mark.parametrize("is_rank", [True, False], ids=["in a rank", "in another process"])
@pytest.mark.parametrize("name", CALLS)
def test_a_patch_calls_the_original_once_and_passes_arguments_and_result_through(name: str, is_rank: bool) -> None:
    found = run_alone(call, name, is_rank)

    assert (found.calls, found.is_all_given) == (1, True)
    assert found.is_returned or name.endswith(RETURNS_NOTHING)


class Called(NamedTuple):
    """What has become of a call of a patched function.

    is_all_given   whether the original got all that the script gave; is_same: and nothing else
    raised         what the script gets in place of a result
    """

    calls: int
    is_all_given: bool
    is_same: bool
    is_returned: bool
    raised: str
    reason: str


def call(name: str, is_rank: bool = True, ours: Any = None, fails: bool = False) -> Called:
    """Call a wrapper as the script would; `ours` takes the place of what we do in it, and the original may fail."""
    session = make_session(world_size=1)
    become(session if is_rank else None)
    if ours is not None:
        module, _, function = BY_NAME[name].ours.partition(":")
        setattr(importlib.import_module(f"ttprun.{module}"), function, ours)
    original, raised, returned = Original(Thing(), fails), "", None
    args, kwargs = ALL_CALLS[name]
    try:
        returned = replacement_for(BY_NAME[name], original)(*args, **kwargs)
    except ValueError as error:
        raised = str(error)
    given = [*original.calls[0][0], *original.calls[0][1].values()]
    is_all_given = all(value in given for value in (*args, *kwargs.values()))
    is_same = original.calls[0] == (args, kwargs)
    reason = session.unprotected.text
    return Called(len(original.calls), is_all_given, is_same, returned is original.result, raised, reason)


def test_what_our_futures_hold_is_given_to_ddp_without_being_pickled() -> None:
    given = [torch.zeros(2)]

    assert run_alone(extracted, given) == (0, True)


def extracted(given: list[torch.Tensor]) -> tuple[int, bool]:
    original = Original([])
    found = replacement_for(BY_NAME["torch._jit_internal._extract_tensors"], original)(given)
    return len(original.calls), found is given


def test_every_patch_has_a_test_of_its_own() -> None:
    # What these do is tested in test_files.py, and in tests/mindio.
    elsewhere = {"builtins.open", "io.open", "torch.distributed.distributed_c10d._process_group_name"}

    assert set(BY_NAME) == set(CALLS) | elsewhere


@pytest.mark.parametrize("name", BY_NAME)
def test_a_patched_function_still_has_its_name_and_its_help(name: str) -> None:
    assert run_alone(described, name) == ("original", "What the user reads.", True, __name__)


def described(name: str) -> tuple[Any, ...]:
    def original(*args: Any) -> None:
        """What the user reads."""

    original.__name__ = original.__qualname__ = "original"
    ours = replacement_for(BY_NAME[name], original)
    return ours.__name__, ours.__doc__, ours.__wrapped__ is original, ours.__module__


def asked(ask: Callable[[Any], Any], function: Any) -> str:
    """What `inspect` says of a function, also that it knows nothing."""
    try:
        return str(ask(function))
    except (TypeError, ValueError) as error:
        return repr(error)


def annotations(function: Any) -> Any:
    return getattr(function, "__annotations__", None)


def asked_otherwise() -> list[str]:
    """The patched functions of which `inspect` says something else than of the originals."""
    different = []
    for name, patch in BY_NAME.items():
        if importlib.util.find_spec(patch.module.partition(".")[0]) is None:
            continue  # torch_npu, where there is no NPU
        *path, attribute = patch.attribute.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(patch.module))
        original = getattr(owner, attribute)
        ours = replacement_for(patch, original)
        for ask in (inspect.signature, inspect.getfullargspec, annotations):
            if asked(ask, ours) != asked(ask, original):
                different.append(f"{ask.__name__} of {name}: {asked(ask, ours)}, not {asked(ask, original)}")
    return different


def test_a_patched_function_has_the_parameters_of_the_original() -> None:
    assert run_alone(asked_otherwise) == []


def where_patched() -> dict[str, bool]:
    """After all patches: whether each name by which torch gives a function out is ours."""
    import io

    assert patch_table.apply_all(with_replay=True) == []
    places: dict[str, Any] = {
        "dist.init_process_group": dist.init_process_group,
        "dist.new_group": dist.new_group,
        "dist.destroy_process_group": dist.destroy_process_group,
        "torch.save": torch.save,
        "torch.serialization.save": torch.serialization.save,
        "DataLoader.__iter__": DataLoader.__iter__,
        "os.urandom": os.urandom,
        "open": open,
        "io.open": io.open,
    }
    return {name: hasattr(found, "__wrapped__") for name, found in places.items()}


PATCHING = """
import sys, torch
from ttprun.rank.bootstrap import patch_table
of_torch = set(sys.modules)
missing = patch_table.apply_all(with_replay=True)
more = [name for name in set(sys.modules) - of_torch if name.partition(".")[0] == "torch"]
from torch.distributed.fsdp._flat_param import FlatParamHandle
print(missing, more, hasattr(FlatParamHandle.__init__, "__wrapped__"))
"""


def test_patching_imports_nothing_of_torch_and_comes_later_where_the_script_imports_more() -> None:
    done = subprocess.run([sys.executable, "-c", PATCHING], capture_output=True, text=True, timeout=60)

    assert done.stdout == "[] [] True\n", done.stderr


def test_a_function_is_patched_under_all_its_names() -> None:
    found = run_alone(where_patched)

    assert [name for name, is_ours in found.items() if not is_ours] == []


def without_some() -> list[str]:
    """Another torch: a function, a class and a module are not there."""
    del torch_dataloader._BaseDataLoaderIter._reset
    del sys.modules["torch.serialization"].save
    patch_table.PATCHES = (*PATCHES, Patch("torch.not_there", "x", "capture.effects.script_files:wrap_save", ""))  # type: ignore[misc]
    return [*patch_table.apply_all(with_replay=False), str(hasattr(dist.init_process_group, "__wrapped__"))]


class Clock:
    """As logging.Formatter: functions in C as a class's attributes, which do not become methods."""

    def __init__(self) -> None:
        kept = {"converter": time.localtime, "pid": os.getpid, "opener": open}
        self.kind = type("Formatter", (), kept)
        self.copy = copy.deepcopy(kept)
        self.pickled = pickle.loads(pickle.dumps(kept))

    def used(self) -> tuple[bool, ...]:
        found = self.kind()
        with found.opener(os.devnull) as file:
            name = file.name
        return (
            found.converter(86400 * 30).tm_year == 1970,
            found.pid() == os.getpid(),
            name == os.devnull,
            self.copy["converter"] is self.pickled["converter"] is time.localtime,
        )


def uses_of_functions_in_c() -> tuple[bool, ...]:
    patch_table.apply_all(with_replay=False)
    become(make_session(world_size=1))
    return Clock().used()


def test_a_patched_function_in_c_as_a_class_attribute_does_not_become_a_method() -> None:
    assert run_alone(uses_of_functions_in_c) == (True, True, True, True)


def test_a_missing_attribute_switches_off_that_patch_alone() -> None:
    assert run_alone(without_some) == [
        "torch.utils.data.dataloader._BaseDataLoaderIter._reset", "torch.serialization.save", "torch.not_there.x", "True",
    ]  # fmt: skip


def test_a_script_starts_before_torch_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules)\n")

    assert run_under_shim([str(script)], tmp_path).printed == "False\n"


PATCHED = """
import ttprun.rank.bootstrap.patch_table as p
from ttprun.introspect.patching import Patch
p.PATCHES = (*p.PATCHES, Patch({}, ''))
import torch, torch.distributed
print(torch.rand(1).shape)
"""


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("'torch', 'not_there', 'capture.effects.script_files:wrap_save'", "on this torch version: torch.not_there"),
        ("'torch', 'rand', 'nothing:wrap'", "ttprun.nothing"),
    ],
    ids=["a protection that is off", "hooks that break"],
)
def test_what_cannot_be_patched_leaves_the_script_alone_and_is_said_once(tmp_path: Path, patch: str, said: str) -> None:
    (tmp_path / "script.py").write_text(PATCHED.format(patch))

    found = run_under_shim([str(tmp_path / "script.py")], tmp_path)

    assert (found.code, found.printed) == (0, "torch.Size([1])\n")
    notes = [message.text for message in found.messages if isinstance(message, from_rank.Note)]
    reasons = [message.reason.text for message in found.messages if isinstance(message, from_rank.RankUnprotected)]
    assert [said in text for text in (*notes, *reasons)] == [True]


class OfOursError(Exception):
    """Something of ours that breaks."""


def breaking_before(original: Any) -> Any:
    def ours(*args: Any, **kwargs: Any) -> Any:
        raise OfOursError("broken")

    return ours


def breaking_after(original: Any) -> Any:
    def ours(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise OfOursError("broken")

    return ours


@pytest.mark.parametrize("ours", [breaking_before, breaking_after], ids=["before the original", "behind it"])
@pytest.mark.parametrize("name", BY_NAME)
def test_where_ours_breaks_the_original_is_called_once_and_protection_ends(name: str, ours: Any) -> None:
    found = run_alone(call, name, True, ours)

    assert (found.calls, found.is_same, found.is_returned) == (1, True, True)
    assert found.reason.startswith(f"ttprun failed in {name}: OfOursError('broken')")


@pytest.mark.parametrize("name", CALLS)
def test_what_the_original_raises_is_the_scripts_own_and_passes(name: str) -> None:
    found = run_alone(call, name, True, None, True)

    assert (found.calls, found.raised) == (1, "the user's")
    assert not found.reason.startswith("ttprun failed")
