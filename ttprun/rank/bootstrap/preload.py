"""Import in a standby what the ranks have imported, and check that each import leaves what it would leave in a rank.

The script that a copy of the standby runs does not import these modules again, so the effects of their code must not
depend on the process or the moment. A module is refused, with a reason, if it

    reads what differs between ranks (RANK, the process id),
    changes what a script may have set before (random states, variables, signal handlers, settings of torch, ...),
    starts a thread or a process, or keeps a file, a connection or shared memory open,
    fails, or imports a module that the ranks do not have, or comes from another file than in the ranks.

After a refusal this standby is not copied, and a new one imports all modules but these. Only packages are imported,
never the user's files. Begin with `preload`.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.util
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ttprun.introspect import random_state
from ttprun.protocol.codec import Refused, decode
from ttprun.protocol.standby_messages import PreloadPlan
from ttprun.rank.bootstrap.rerun import RunAgain

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD"))
_bootstrap: Any = sys.modules["_frozen_importlib"]
_environment: Any = os.environ
_FILES, _VARIABLES, _FINDERS = "the open files", "environment variables", "sys.meta_path"
added: dict[str, str] = {}  # environment variables that imports have added
again = RunAgain()
_lasting_threads = 1


class _Pid(int):
    """A process id that is an object of its own, unlike a small int: its reference count shows whether it is kept."""


class _Watched(dict[bytes, bytes]):
    """The environment's variables; reading one that differs between ranks, or all of them, refuses the module."""

    def __init__(self, variables: dict[bytes, bytes], own: Sequence[str], is_read: Callable[[str], None]) -> None:
        super().__init__(variables)
        self._own = {os.fsencode(name) for name in own}
        self._is_read = is_read

    def __getitem__(self, key: bytes) -> bytes:
        if key in self._own:
            self._is_read(os.fsdecode(key))
        return super().__getitem__(key)


class Preloading:
    """One round of imports.

    files     of each module that all ranks have, "" for one that is not to be imported
    left_out  modules that an earlier round has refused
    notebook  descriptor of a memory file with the names of the modules being imported; the agent reads it if we crash
    again     the statements that are to run again in each rank
    refused   the reason, by the name of the module
    """

    def __init__(self, files: dict[str, str], left_out: Sequence[str], notebook: int, again: RunAgain) -> None:
        self._files = files
        self._again = again
        self._left_out = frozenset(left_out)
        self._notebook = notebook
        self._running: list[str] = []
        self._imports: set[tuple[str, str]] = set()  # (importing module, imported module)
        self._pids: list[tuple[int, tuple[str, ...]]] = []  # each pid returned, and the modules being imported
        self._know_forks: set[str] = set()  # packages that handle forks themselves
        self.added: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def refuse(self, why: str) -> None:
        """Refuse the module that is being imported, and those that are importing it."""
        for name in self._running:
            self.refused.setdefault(name, why)

    def is_read(self, variable: str) -> None:
        """A variable that differs between ranks is read: refuse the module that is being imported, unless it may."""
        if self._running and not self._again.may_read(self._running[-1], variable):
            self.refuse(f"it reads {variable}")

    def compare(self, before: dict[str, Any]) -> None:
        """Refuse the module that is being imported if it has changed the process, but for variables it has added."""
        now = _state()
        changed = [what for what in now if now[what] != before.get(what, now[what])]
        if _FILES in changed and now[_FILES] <= before[_FILES]:
            changed.remove(_FILES)  # only closed some
        if _FINDERS in changed and now[_FINDERS][: len(before[_FINDERS])] == before[_FINDERS]:
            changed.remove(_FINDERS)  # only appended some: they are asked last, as in a rank
        if _VARIABLES in changed and now[_VARIABLES].items() >= before[_VARIABLES].items():
            changed.remove(_VARIABLES)
            added = now[_VARIABLES].keys() - before[_VARIABLES].keys()
            self.added.update((os.fsdecode(name), os.fsdecode(now[_VARIABLES][name])) for name in added)
        if changed:
            self.refuse(f"its import changes {', '.join(changed)}")

    def load(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Replacement for importlib._bootstrap._load_unlocked, through which each module's code is run."""

        def load_unlocked(spec: Any) -> Any:
            before, random_before = _state(), random.getstate()
            if self._running:
                self._imports.add((self._running[-1], spec.name))
            self._running.append(spec.name)
            self._note()
            try:
                module = original(spec)
                self._again.after_import(spec.name, random_before)
                expected = self._files.get(spec.name, "")
                if spec.name.partition(".")[0] != "torch" and expected != _file_of(spec):
                    self.refuse(self._why_not(spec.name, expected, _file_of(spec)))
            finally:
                self.compare(before)
                self._running.pop()
                self._note()
            return module

        return load_unlocked

    def _why_not(self, name: str, expected: str, file: str) -> str:
        if name in self._left_out or name.partition(".")[0] in self._left_out:
            return f"it imports {name}"
        return f"it comes from {file}" if expected else f"it imports {name}, which not all ranks have"

    def _note(self) -> None:
        noted = "\n".join(self._running).encode()
        os.pwrite(self._notebook, len(noted).to_bytes(4, "little") + noted, 0)

    def get(self, name: str) -> None:
        """Import one module; it is refused if that raises."""
        before = _shared()
        try:
            importlib.import_module(name)
        except BaseException as error:
            self.refused.setdefault(name, f"its import fails here: {type(error).__name__}: {error}"[:200])
        if _shared() != before:
            self.refused.setdefault(name, "its import keeps shared memory or a child process")

    def finish(self) -> None:
        """Refuse also modules that keep this process's id, and those that import a refused one."""
        gc.collect()
        while self._pids:
            pid, running = self._pids.pop()
            if running[-1].partition(".")[0] in self._know_forks:
                continue
            is_kept = sys.getrefcount(pid) > 2 or any(  # one for `pid`, one for the call
                str(pid) in value for value in vars(sys.modules.get(running[-1], sys)).values() if type(value) is str
            )
            if is_kept:
                for name in running:
                    self.refused.setdefault(name, "it keeps the process id")
        before = -1
        while before != len(self.refused):
            before = len(self.refused)
            for importing, wanted in self._imports:
                if wanted in self.refused and wanted != importing:
                    self.refused.setdefault(importing, f"it imports {wanted}")

    @contextlib.contextmanager
    def watching(self, own: Sequence[str]) -> Iterator[None]:
        """Watch imports inside the `with`."""
        original, getpid, register, ask = _bootstrap._load_unlocked, os.getpid, os.register_at_fork, builtins.__import__

        def get_pid() -> int:
            pid = _Pid(getpid())
            if self._running:
                self._pids.append((pid, tuple(self._running)))
            return pid

        def register_at_fork(**functions: Any) -> None:
            self._know_forks.update(name.partition(".")[0] for name in self._running)
            register(**functions)

        def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if self._running:
                full = name
                if level:
                    full = importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__") or "")
                modules = (name for name in map(f"{full}.{{}}".format, fromlist or ()) if name in sys.modules)
                self._imports.update((self._running[-1], wanted) for wanted in (full, *modules))
            return ask(name, globals, locals, fromlist, level)

        watched = _Watched(_environment._data, own, self.is_read)
        environments: tuple[Any, ...] = (os.environ, os.environb)
        _bootstrap._load_unlocked = self.load(original)
        os.getpid, os.register_at_fork, builtins.__import__ = get_pid, register_at_fork, import_
        for environment in environments:
            environment._data = watched
        try:
            yield
        finally:
            _bootstrap._load_unlocked = original
            os.getpid, os.register_at_fork, builtins.__import__ = getpid, register, ask
            variables = dict(dict.items(watched))
            for environment in environments:
                environment._data = variables


def preload(plan_fd: int, notebook: int) -> dict[str, str]:
    """Import modules, each after the changes of the environment that preceded it in a rank.

    plan_fd   a memory file with a `PreloadPlan`, read to its end and closed
    notebook  see Preloading; closed
    returns   the reason for each refused module

    Raises RuntimeError if the plan cannot be read.
    """
    with open(plan_fd, "rb") as file:
        file.seek(0)
        plan: PreloadPlan | Refused = decode(file.read(), {"PreloadPlan": PreloadPlan})
    if isinstance(plan, Refused):
        raise RuntimeError(f"the plan of the imports cannot be used: {plan.reason}")
    again.allow(plan.given)
    preloading = Preloading({name: origin for name, origin, _ in plan.modules}, plan.left_out, notebook, again)
    entry = sys.path.pop(0) if sys.path else ""  # the directory of this program, where a rank has its script's
    before = sys.argv
    with _silence():
        sys.argv = list(plan.arguments)
        try:
            with preloading.watching(plan.own):
                for name, origin, changes in plan.modules:
                    _change_environment(changes)
                    if origin and name not in sys.modules:
                        preloading.get(name)
                preloading.finish()
        finally:
            sys.argv = before
            sys.path.insert(0, entry)
    os.close(notebook)
    added.update(preloading.added)
    return preloading.refused


def _change_environment(changes: dict[str, str | None]) -> None:
    for key, value in changes.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what imports print: the ranks have printed it."""
    saved, null = [os.dup(fd) for fd in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for fd, kept in zip((1, 2), saved, strict=True):
            os.dup2(kept, fd)
            os.close(kept)


def _file_of(spec: Any) -> str:
    places = spec.submodule_search_locations or ()
    return str(spec.origin) if spec.origin is not None else os.pathsep.join(places)


def _state() -> dict[str, Any]:
    """What an import must not change: a script may have set it before."""
    settings: dict[str, Any] = {
        _VARIABLES: dict(dict.items(_environment._data)),
        "the working directory": os.getcwd(),
        "the threads": _threads(),
        _FILES: frozenset(os.listdir("/proc/self/fd")),
        "the signal handlers": [signal.getsignal(number) for number in _SIGNALS],
        "sys.path": list(sys.path),
        _FINDERS: list(map(id, sys.meta_path)),
        "sys.path_hooks": list(map(id, sys.path_hooks)),
        "sys.excepthook": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "limits of Python": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()),
        "the garbage collector": (gc.isenabled(), gc.get_threshold(), list(map(id, gc.callbacks))),
        "whether denormal numbers are flushed to zero": sys.float_info.min / 2 != 0.0,
    }
    for name, state in random_state.capture().items():
        settings[f"the random state of {name}"] = state
    settings["settings of torch"] = _settings_of_torch()
    settings["settings of numpy"] = _settings_of_numpy()
    context = sys.modules.get("multiprocessing.context")
    if context is not None:
        settings["multiprocessing's start method"] = context._default_context._actual_context
    return settings


def _threads() -> int:
    """The number of threads that a fork would lose. A BLAS ends its own before a fork, and restarts them."""
    global _lasting_threads
    if len(os.listdir("/proc/self/task")) != _lasting_threads:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        _lasting_threads = len(os.listdir("/proc/self/task"))
    return _lasting_threads


def _settings_of_torch() -> list[Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    hooks = [value for of in (modules, optimizers) for name, value in vars(of).items() if name.startswith("_global_")]
    backends = torch.backends
    return [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_function_stack(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic, backends.mkldnn.enabled),
        torch.multiprocessing.get_sharing_strategy(),
        [len(table) for table in hooks if isinstance(table, dict)],
    ]


def _settings_of_numpy() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else (numpy.geterr(), numpy.get_printoptions()["precision"])


def _shared() -> tuple[int, bool]:
    """The number of writable shared mappings, and whether there are child processes."""
    with open("/proc/self/maps", "rb") as maps:
        shared = sum(b" rw-s " in line for line in maps)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return shared, False
    return shared, True
