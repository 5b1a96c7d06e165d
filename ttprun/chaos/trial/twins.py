"""The runs of a trial: a launcher with a script, in a folder of its own, maybe in a copy of the working folder.

Begin with `Launch.run` and `WorkingCopy.make`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ttprun import text_hashes
from ttprun.config import LaunchValue
from ttprun.errors import ConfigError
from ttprun.observe.events import read_events
from ttprun.observe.status import RunStatus, read_status

GRACE_S = 45.0
_LOOK_EVERY_S = 0.5
_ANNOUNCED = "[Gloo] Rank "  # some releases of torch say on stdout that a group has connected; after a repair again
_PR_SET_PDEATHSIG = 1
# Loaded here, not between fork and exec, where another thread's lock would never be given back.
_LIBC = ctypes.CDLL(None)
# torchrun's options that say where ranks meet.
PLACES = {"standalone", "nnodes", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"}
FOREIGN = re.compile(r"(PET|TTPRUN|TORCHELASTIC|TORCH_ELASTIC|GROUP|ROLE|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$")


@dataclass(frozen=True)
class Twin:
    """A run that has ended.

    folder     its own: launcher.log, logs/, run/ (ttprun's run directory), and what the script wrote there
    exit_code  of the launcher; -N if signal N ended it
    took_s     seconds, start of Python included
    output     rank -> lines that it wrote to stdout, of all its processes in their order; without those of gloo
    problem    why it did not end by itself, "" if it did
    """

    folder: Path
    exit_code: int
    took_s: float
    output: dict[int, list[str]]
    problem: str = ""
    status: RunStatus | None = None
    events: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def place_for_runs(folder: str | None, prefix: str) -> Iterator[Path]:
    """A folder for all that runs leave: the named one, which is kept, or a new one, which is removed afterwards.

    Raises ConfigError if the named one is not empty.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as place:
            yield Path(place)
        return
    named = Path(folder).absolute()
    if named.exists() and (not named.is_dir() or any(named.iterdir())):
        raise ConfigError(f"--folder: '{folder}' is not empty", "name a new one")
    yield named


@dataclass(frozen=True)
class Launch:
    """What a run starts.

    launcher     "torchrun" or "ttprun"
    options      of it, before the script
    command      the script and its arguments, or a module and its own
    environment  of the launcher
    limit_s      seconds that the run may take
    directory    where it runs; None: in the run's own folder
    python       the interpreter of all
    """

    launcher: Literal["torchrun", "ttprun"]
    options: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str]
    limit_s: float
    directory: str | Path | None = None
    python: str = sys.executable

    def words(self, folder: Path) -> list[str]:
        """The launcher's command line. All that it leaves lies in `folder`: logs/, and of ttprun run/."""
        module = {"torchrun": "torch.distributed.run", "ttprun": "ttprun"}[self.launcher]
        ours = ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        ours += ["--run-dir", str(folder / "run")] if self.launcher == "ttprun" else []
        return [self.python, "-m", module, *self.options, *ours, *self.command]

    def run(self, folder: Path, is_hopeless: Callable[[], str] = lambda: "") -> Twin:
        """Run to the end, or for so long as may be, and gather what is left.

        folder       of the run; it exists
        is_hopeless  asked every half second: why it need not be waited for any longer, "" to go on
        """
        environment = dict(self.environment)
        if self.launcher == "torchrun":  # else sets of texts come in another order than under ttprun
            environment[text_hashes.VARIABLE] = text_hashes.seed_for(environment)
        started = time.monotonic()
        with open(folder / "launcher.log", "wb") as log:
            process = subprocess.Popen(
                self.words(folder),
                cwd=self.directory or folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        problem = _wait(process, self.limit_s, is_hopeless)
        twin = Twin(folder, process.returncode, time.monotonic() - started, _output(folder), problem)
        file, events = folder / "run" / "status.json", folder / "run" / "events.jsonl"
        return replace(twin, status=read_status(file), events=[*read_events(events)]) if file.exists() else twin


def clean_environment() -> dict[str, str]:
    """Ours, without what an outer launcher has left: each of it would change what a run does."""
    return {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}


def words_of(launch: Mapping[str, LaunchValue]) -> list[str]:
    """torchrun's options as words of its command line."""
    words = []
    for name, value in launch.items():
        option = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [value]
        words += [option] if value is True else [word for item in values for word in (option, str(item)) if item]
    return words


def end_with_parent() -> None:
    """Have the kernel end the launcher, as an operator would, when we die, however we die (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], limit_s: float, is_hopeless: Callable[[], str]) -> str:
    """Wait for the end; one that takes too long is ended. An interruption of ours ends it too."""
    ends_s = time.monotonic() + limit_s
    try:
        while time.monotonic() < ends_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(_LOOK_EVERY_S, max(0.0, ends_s - time.monotonic())))
                return ""
            if why := is_hopeless():
                return why
        return f"it did not end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _output(folder: Path) -> dict[int, list[str]]:
    """Local rank -> lines of <log dir>/<run>/attempt_<n>/<local rank>/stdout.log, attempts in their order."""
    output: dict[int, list[str]] = {}
    for path in sorted(folder.glob("logs/*/attempt_*/*/stdout.log"), key=_attempt):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        output.setdefault(int(path.parent.name), []).extend(line for line in lines if not line.startswith(_ANNOUNCED))
    return output


def _attempt(path: Path) -> tuple[int, int]:
    return int(path.parents[1].name.removeprefix("attempt_")), int(path.parent.name)


# A copy of the working folder for each run, so that no run sees what another has written, nor the user's files change.


LIMIT_BYTES = 1 << 30
LIMIT_FILES = 20_000
# Of no use to a run, or large and not written: the latter are linked.
_LEFT_OUT = {"__pycache__", "ttprun-runs"}
_LINKED = {".git", ".venv", "node_modules"}
_MIB = 1 << 20


def check_size(source: Path, shared: Collection[str], limit_bytes: int = LIMIT_BYTES) -> None:
    """Raise ConfigError if the folder is too large to be copied, naming what is large in it.

    shared   names in the folder that are linked
    """
    for name in shared:
        if not (source / name).exists():
            raise ConfigError(f"--share: there is no '{name}' in the working folder", "give a name inside it")
    sizes: dict[str, int] = {}
    files = 0
    for path, status in _walk(source, {*shared, *_LINKED}):
        top = path.relative_to(source).parts[0]
        sizes[top] = sizes.get(top, 0) + status.st_size
        files += 1
        if files > LIMIT_FILES:
            break
    total = sum(sizes.values())
    if total <= limit_bytes and files <= LIMIT_FILES:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    many = f"more than {LIMIT_FILES} files" if files > LIMIT_FILES else f"{total // _MIB} MiB"
    raise ConfigError(
        f"the working folder holds {many}, and each run gets a copy of it; largest: '{largest}' "
        f"({sizes[largest] // _MIB} MiB)",
        f"add --share {largest} if the script only reads there, or --in-place for no copies at all",
    )


class WorkingCopy:
    """One copy.

    folder   its own
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self._before = dict(_states(folder))

    @classmethod
    def make(cls, source: Path, folder: Path, shared: Collection[str]) -> WorkingCopy:
        """Copy the folder; what is shared, and folders that nobody trains into, are links to the user's own.

        folder   must not exist yet
        shared   names in `source` that are linked, not copied

        Raises OSError, shutil.Error.
        """
        linked = {*shared, *_LINKED}

        def leave_out(directory: str, names: list[str]) -> set[str]:
            here = Path(directory)
            excluded = {name for name in names if name in _LEFT_OUT or _is_special(here / name)}
            return excluded | {name for name in names if _is_linked(source, here / name, linked)}

        shutil.copytree(source, folder, symlinks=True, ignore=leave_out)
        for path in _linked_in(source, linked):
            os.symlink(path, folder / path.relative_to(source))
        return cls(source, folder)

    @classmethod
    def none(cls, source: Path) -> WorkingCopy:
        """The user's folder itself: nothing is said of what is written there."""
        copy = cls.__new__(cls)
        copy.source = copy.folder = source
        copy._before = {}
        return copy

    @property
    def is_copy(self) -> bool:
        """Whether it is not the user's folder itself."""
        return self.folder != self.source

    def changed(self) -> list[str]:
        """Files that have been written since, by their names in the folder."""
        if not self.is_copy:
            return []
        return sorted(
            name
            for name, state in _states(self.folder)
            if self._before.get(name) != state and not _LEFT_OUT & {*Path(name).parts}
        )

    def inside(self, path: str) -> str:
        """A path of the user's as it is here; itself if it lies outside the folder."""
        full = Path(path).absolute()
        if not self.is_copy or not os.path.isabs(path) or not full.is_relative_to(self.source):
            return path
        return str(self.folder / full.relative_to(self.source))

    def as_users(self, text: str) -> str:
        """A message with the user's own paths."""
        return text.replace(f"{self.folder}{os.sep}", "").replace(str(self.folder), str(self.source))


def _walk(source: Path, linked: Collection[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """The files that a copy would hold."""
    for directory, folders, files in os.walk(source):
        here = Path(directory)
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not _is_linked(source, here / name, linked)]
        for name in files:
            path = here / name
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and not _is_linked(source, path, linked):
                yield path, status


def _is_linked(source: Path, path: Path, linked: Collection[str]) -> bool:
    return str(path.relative_to(source)) in linked or path.name in _LINKED or (path / "pyvenv.cfg").exists()


def _linked_in(source: Path, linked: Collection[str]) -> Iterator[Path]:
    for directory, folders, files in os.walk(source):
        here = Path(directory)
        links = [name for name in (*folders, *files) if _is_linked(source, here / name, linked)]
        folders[:] = [name for name in folders if name not in links and name not in _LEFT_OUT]
        yield from (here / name for name in links)


def _is_special(path: Path) -> bool:
    mode = path.lstat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _states(folder: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for path, status in _walk(folder, _LINKED):
        yield str(path.relative_to(folder)), (status.st_ino, status.st_size, status.st_mtime_ns)
