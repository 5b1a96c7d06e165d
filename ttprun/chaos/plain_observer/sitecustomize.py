"""Notes what a rank's optimizers work with after each step, under torchrun and under ttprun alike, by torch's own hook.

Under torchrun it is all that is added to a rank. So it imports nothing of ttprun's, removes itself from PYTHONPATH and
its variable from the environment, and reads only: the script runs as without it, except that it ends after so many
steps. A launcher, which has no rank, is left alone. Begin with `begin`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import io
import json
import os
import random
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

VARIABLE = "_TTPRUN_PLAIN_OBSERVER"
SEED = 20  # of what the script does not seed, so that two runs of it can be compared
_HASH_SEED = "_TTPRUN_HASH_SEED"


def order(folder: str, is_alone: bool, steps: int, steps_of_rank: Mapping[int, int]) -> dict[str, str]:
    """The variable that asks for notes.

    folder         gets plain<rank>.jsonl
    is_alone       under torchrun, where nothing else seeds what the script does not, or ends it after its steps
    steps          after which a rank leaves; `steps_of_rank` says it for single ranks
    """
    named = {str(rank): count for rank, count in steps_of_rank.items()}
    return {VARIABLE: json.dumps({"folder": folder, "is_alone": is_alone, "steps": steps, "steps_of_rank": named})}


def begin() -> None:
    """Called at the start of each Python of the launch: be a rank's observer, and hand over to the hidden module."""
    try:
        ordered = os.environ.get(VARIABLE)
        if ordered and "RANK" in os.environ:
            del os.environ[VARIABLE]
            _leave_path()
            rank = int(os.environ["RANK"])
            _after_torch(_Notes(rank=rank, **json.loads(ordered)).begin)
    finally:
        _run_hidden()


def _leave_path() -> None:
    """Restore PYTHONPATH, and the user's seed for hashes (text_hashes.py), for the script and its children."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != here]
    for name, value in (("PYTHONPATH", os.pathsep.join(paths)), ("PYTHONHASHSEED", os.environ.pop(_HASH_SEED, None))):
        if value:
            os.environ[name] = value
        elif value is not None:
            os.environ.pop(name, None)


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    kept = sys.path[:]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine
    if VARIABLE in os.environ:  # a launcher, whose children find us by the variable
        sys.path[:] = kept


def _after_torch(act: Any) -> None:
    """Call `act` when the script has imported torch."""
    if "torch" in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(act))


class _Finder:
    """Has the later finders find torch, and calls a function after its code has run."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch" or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act()

        loader.exec_module = exec_module


class _Notes:
    """The notes of one rank: a line of JSON after each step of an optimizer. See `order`."""

    def __init__(self, folder: str, is_alone: bool, steps: int, steps_of_rank: dict[str, int], rank: int) -> None:
        self._path = os.path.join(folder, f"plain{rank}.jsonl")
        self._steps = steps_of_rank.get(str(rank), steps)
        self._is_alone, self._rank = is_alone, rank
        self._pid = os.getpid()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # what optimizers are called
        self._named = self._count = 0

    def begin(self) -> None:
        """torch is there."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self._is_alone:
            seed_what_the_system_seeds(self._rank)
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:  # a forked child of the rank
            return
        self._count += 1
        with contextlib.suppress(Exception):  # what cannot be noted is missed by whoever compares
            if optimizer not in self._names:
                self._named += 1
                self._names[optimizer] = f"optimizer {self._named} ({type(optimizer).__name__})"
            noted = {**dict(_values(optimizer, self._names[optimizer])), **dict(_random_states())}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(noted) + "\n")
        if self._is_alone and self._count >= self._steps:
            leave()


def _values(optimizer: Any, name: str) -> Iterator[tuple[str, str]]:
    """What an optimizer works with, by words for it: first what the script has chosen, then what follows from it."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, int | float | bool | str | tuple) or value is None:
                yield f"{key} of group {number} of {name}", repr(value)
            elif hasattr(value, "data_ptr"):
                yield f"{key} of group {number} of {name}", _described(value)
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            which = f"parameter {at} of group {number} of {name}"
            if parameter.grad is not None:
                yield f"the gradient of {which}", _described(parameter.grad)
            yield which, _described(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if hasattr(value, "data_ptr"):
                    yield f"{key} of {which}", _described(value)


def _described(tensor: Any) -> str:
    """The form of a tensor, and the digest of its elements."""
    elements = getattr(tensor, "_local_tensor", tensor).detach()
    if elements.is_sparse:
        elements = elements.to_dense()
    elements = elements.resolve_conj().resolve_neg().cpu().contiguous()
    content = ctypes.string_at(elements.data_ptr(), elements.nbytes) if elements.nbytes else b""
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return f"{str(elements.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}"


def _random_states() -> Iterator[tuple[str, str]]:
    yield "the state of Python's random numbers", _digest(random.getstate())
    if "numpy" in sys.modules:
        yield "the state of numpy's random numbers", _digest(sys.modules["numpy"].random.get_state(legacy=True))
    state = sys.modules["torch"].default_generator.get_state()
    yield "the state of torch's random numbers", _described(state)


def _digest(state: Any) -> str:
    """The digest of a tuple of plain values and arrays."""
    parts = [part.tobytes() if hasattr(part, "tobytes") else repr(part).encode() for part in state]
    return hashlib.blake2b(b" ".join(parts), digest_size=16).hexdigest()


def seed_what_the_system_seeds(rank: int) -> None:
    """Python, numpy and torch begin with the system's random numbers; a seed of the script's comes later."""
    random.seed(SEED + rank)
    sys.modules["torch"].manual_seed(SEED + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED + rank)


def leave() -> NoReturn:
    """End the process as a kill would, but with exit code 0 and nothing left in its files' buffers."""
    for file in gc.get_objects():
        if isinstance(file, io.IOBase) and not file.closed:
            with contextlib.suppress(Exception):
                file.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "sitecustomize":
    begin()
