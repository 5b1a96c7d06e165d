"""The run directory: all files of one run, with fixed names, readable by its owner alone; and the stacks in it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ttprun.errors import ConfigError, suggestion

BASE = Path("ttprun-runs")


class RunDirectory:
    """Paths of one run. `create` makes a directory, `find` looks one up."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self.config = self.path / "config.yaml"
        self.status = self.path / "status.json"
        self.topology = self.path / "topology.json"
        self.events = self.path / "events.jsonl"
        self.history = self.path / "history.csv"
        self.stacks = self.path / "stacks.json"
        self.control_socket = self.path / "control.sock"
        self.control_token = self.path / "control.token"
        self.http_token = self.path / "http.token"
        self.logs = self.path / "logs"
        self._lock_fd: int | None = None
        self._is_new = False

    @classmethod
    def of(cls, run_id: str, path: str | Path | None = None, base: Path = BASE) -> RunDirectory:
        """The directory of a run of that name, or the one that was named for it; it need not be there."""
        return cls(path if path is not None else base / run_id)

    @property
    def nodes(self) -> list[RunDirectory]:
        """The folders of a job on several nodes, one for each node's launcher; none if this is a run itself."""
        return [] if self.is_run else _runs_below(self.path)

    @classmethod
    def create(cls, run_id: str, path: str | Path | None = None, base: Path = BASE) -> RunDirectory:
        """Make the directory with mode 0700 and a new control token, and keep it locked as long as this process lives.

        run_id   its name below `base`, if no `path` is given; with a slash in it, a node's folder in its job's
        path     `~` stands for the home directory

        The directory of a run that has ended is used again: its status and token are replaced, events are appended,
        logs stay.

        Raises ConfigError if the directory cannot be written, belongs to a living run, holds somebody's other files, or
        could be written by somebody else: who can change it can ask the agent for anything.
        """
        run = cls.of(run_id, path, base)
        try:
            try:
                if path is None:
                    _make_base(base)
                run.path.mkdir(mode=0o700, parents=True)
                run._is_new = True
            except FileExistsError:
                run._check_owner()
            if any(run.path.iterdir()) and not run.control_token.is_file():
                raise ConfigError(f"run directory '{run.path}' holds other files", "name a new one with --run-dir")
            run._lock()
            run.path.chmod(0o700)
            run._write_token()
            for stale in (run.status, run.topology, run.stacks, run.control_socket, run.http_token):
                stale.unlink(missing_ok=True)
            run.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run directory '{run.path}' cannot be written ({error.strerror})", "choose another with --run-dir"
            ) from None
        return run

    @classmethod
    def newest(cls, base: Path = BASE) -> RunDirectory | None:
        """The run in `base` that was started last, None if there is none."""
        return max(_runs_in(base), key=lambda run: run.started_at_s, default=None)

    @classmethod
    def find(cls, run: str | None = None, base: Path = BASE) -> RunDirectory:
        """The run of that id in `base`, or in the directory of that name; with None the newest in `base`.

        Raises ConfigError if there is none.
        """
        if run is None:
            newest = cls.newest(base)
            if newest is None:
                raise ConfigError(f"there is no run in '{base}'", "name a run, or the directory that --run-dir named")
            return newest
        for candidate in (cls(base / run), cls(run)):
            if candidate.is_run:
                return candidate
            if nodes := candidate.nodes:
                return next((node for node in nodes if node.path.name == node_name()), nodes[0])
        names = [path.name for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
        raise ConfigError(f"there is no run '{run}'", suggestion(run, names, f"see the names in '{base}'"))

    def _check_owner(self) -> None:
        """An existing directory must be this user's alone. Raises ConfigError, OSError."""
        status = self.path.lstat()
        cure = "name another with --run-dir"
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"run directory '{self.path}' is a symbolic link", f"{cure}, or the place it leads to")
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"run directory '{self.path}' is a file", cure)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"run directory '{self.path}' belongs to another user (uid {status.st_uid})", cure)
        rights = stat.S_IMODE(status.st_mode)
        if rights & 0o077:
            raise ConfigError(
                f"run directory '{self.path}' is open to other users (mode {rights:04o})", f"chmod 700 it, or {cure}"
            )

    @property
    def is_run(self) -> bool:
        """Whether a run was ever started here."""
        return self.control_token.is_file() or self.status.is_file()

    @property
    def started_at_s(self) -> float:
        """Unix time at which the run was started: its token is written once, at the start. 0 if it has none."""
        with suppress(OSError):
            return self.control_token.stat().st_mtime
        return 0.0

    @contextmanager
    def control_address(self) -> Iterator[str]:
        """A path of the control socket to bind or connect to, short enough for any run directory; valid inside `with`.

        A socket's address holds 107 bytes, so it goes through a descriptor of the directory.
        """
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{self.control_socket.name}"
        finally:
            os.close(fd)

    def read_token(self) -> str:
        """The secret that a control message must carry. Raises OSError if the run has none."""
        return self.control_token.read_text(encoding="ascii").strip()

    def release(self) -> None:
        """Give the directory back before this process ends."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def discard(self) -> None:
        """Remove a directory that `create` has just made, when the run cannot start after all."""
        self.release()
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def _write_token(self) -> None:
        """Before all else, and never removed: by it the directory is known as ours, whenever this process is killed."""
        fd = os.open(self.control_token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as token:
            os.fchmod(fd, 0o600)
            token.write(secrets.token_hex(16))

    def _lock(self) -> None:
        """Take the directory for this process; the kernel gives it back when the process ends, however it ends."""
        self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"run directory '{self.path}' belongs to a run that is still alive", "choose another"
            ) from None
        except OSError:
            pass  # a file system without locks; two runs in one directory are then the user's to avoid


def replace_file(path: Path, text: str) -> None:
    """Replace a file of a run at once: a reader sees the old text or the new one, never a part. Raises OSError."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)


def _make_base(base: Path) -> None:
    """Make the folder of all runs; a new one has a `.gitignore`, so that git ignores it."""
    with suppress(FileExistsError):
        base.mkdir(parents=True)
        with suppress(OSError):
            (base / ".gitignore").write_text("*\n", encoding="utf-8")


def node_name() -> str:
    """What the scheduler calls this node, or it calls itself; fit for the name of a folder."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "node"


def _runs_in(base: Path) -> list[RunDirectory]:
    """Runs, and the folders of the nodes of jobs."""
    folders = map(RunDirectory, sorted(base.iterdir())) if base.is_dir() else ()
    return [
        run for folder in folders if folder.path.name[0] != "." for run in ([folder] if folder.is_run else folder.nodes)
    ]


def _runs_below(path: Path) -> list[RunDirectory]:
    with suppress(OSError):
        return [run for run in map(RunDirectory, sorted(path.iterdir())) if run.is_run and run.path.name[0] != "."]
    return []


# Python stacks of all ranks of a node, for `ttprun stacks` and the page; the agent writes them to `stacks.json`.
#
# Ranks that stand at the same place are one group, as people sort the output of py-spy by hand. See `groups_of`.


@dataclass(frozen=True)
class RankStack:
    """Where one rank stands.

    step         steps that it has applied
    doing        what its main thread does, as far as the hooks know: computing, collective, waiting, ...
    operation    the newest collective; "none" before the first
    main         stack of the main thread, innermost frame first, without ttprun's own frames; "" if it was not had
    all_threads  as the interpreter wrote it
    """

    rank: int
    pid: int
    step: int
    doing: str
    operation: str
    main: str
    all_threads: str


@dataclass(frozen=True)
class StackReport:
    """The stacks of a node's ranks at one moment.

    number   counts the reports of a run
    at       when they were asked for, ISO 8601
    """

    number: int
    at: str
    ranks: tuple[RankStack, ...]

    def to_json(self) -> str:
        """One JSON document on one line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Group:
    """Ranks that stand at the same place.

    place   "step 12, waiting in allreduce"
    main    their stack; "" if it was not had
    """

    ranks: tuple[int, ...]
    place: str
    main: str


def groups_of(stacks: Iterable[RankStack]) -> tuple[Group, ...]:
    """Ranks by equal places, the likeliest cause first: who does not wait for the others, then the smallest group."""
    members: dict[tuple[bool, str, str], list[int]] = {}
    for stack in stacks:
        waits = stack.doing in ("collective", "waiting", "connecting")
        place = f"step {stack.step}, {stack.doing}" + (f" in {stack.operation}" if waits else "")
        members.setdefault((waits, place, stack.main), []).append(stack.rank)
    in_order = sorted(
        (waits, len(ranks), sorted(ranks), place, main) for (waits, place, main), ranks in members.items()
    )
    return tuple(Group(tuple(ranks), place, main) for _, _, ranks, place, main in in_order)


def read_stacks(path: Path) -> StackReport:
    """What was written last. Raises OSError if there is no such file, ValueError if it is something else."""
    try:
        return TypeAdapter(StackReport).validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no stacks: {error}") from error


# A trace: what --trace leaves, a line of digests for each step of each rank (chaos/step_digests.py).


TRACE_HEAD = "ttprun-trace 2"
_MADE_BY = "name a file that '--trace FILE' has written, or a run that was started with it"
Links = dict[str, str]


@dataclass
class Trace:
    """What a run has left.

    steps     rank -> step -> letter -> digest; "n": batches/losses, "v": the newest loss, "G": parts of the gradient
    settings  rank -> (step, what was set from then on), in order
    """

    steps: dict[int, dict[int, Links]] = field(default_factory=dict)
    settings: dict[int, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)

    def settings_at(self, rank: int, step: int) -> dict[str, Any]:
        """All that is set in a step."""
        rows = [new for since, new in self.settings.get(rank, []) if since <= step]
        return {name: value for new in rows for name, value in new.items()}

    def add(self, line: str) -> None:
        """Take one line; of a step that is taken again, as after a fault, it replaces the former and all later ones.

        Raises ValueError, IndexError if it is none.
        """
        words = line.split(" ")
        is_setting = words[0] == "@"
        rank, step, word = int(words[is_setting]), int(words[1 + is_setting]), words[2]
        if is_setting:
            rows = [row for row in self.settings.get(rank, []) if row[0] <= step and step]
            self.settings[rank] = [*rows, (step, dict(json.loads(line.split(" ", 3)[3])))]
            return
        links = {each[0]: each[1:] for each in words[3:]} | ({"n": word} if "/" in word else {})
        for letter, same in (("w", "p"), ("c", "g")):
            if same in links:
                links.setdefault(letter, links[same])
        taken = self.steps.setdefault(rank, {})
        while taken and next(reversed(taken)) >= step:
            taken.popitem()
        taken[step] = links

    def later(self, by: int) -> Trace:
        """The same with other numbers of steps."""
        steps = {rank: {step + by: links for step, links in taken.items()} for rank, taken in self.steps.items()}
        return Trace(steps, {rank: [(at + by, new) for at, new in rows] for rank, rows in self.settings.items()})


def read_trace(path: Path) -> Trace:
    """A trace, as far as it was written: a killed run may have left a part of a last line.

    path   of the file, or of the directory of a run that has made one

    Raises ConfigError if it is none.
    """
    try:
        if path.is_dir():
            named = re.search(r"^trace: *(\S.*)$", (path / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
            path = Path(named[1].strip("\"'")) if named and named[1] != "null" else path
        head, *lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"no trace can be read from '{path}': {why}", _MADE_BY) from None
    if head != TRACE_HEAD:
        if head.startswith(TRACE_HEAD.split(" ")[0]):
            raise ConfigError(f"the trace '{path}' is of another version of ttprun ({head[:40]})", "make it again")
        raise ConfigError(f"'{path}' is not a trace", _MADE_BY)
    trace = Trace()
    for number, line in enumerate(lines[:-1], 2):
        try:
            trace.add(line)
        except (ValueError, IndexError):
            raise ConfigError(f"'{path}', line {number}: this is not a line of a trace", "make it again") from None
    if not trace.steps:
        raise ConfigError(f"the trace '{path}' holds no step", "let the run take an optimizer step")
    return trace


def begin_trace(name: str, may_resume: bool) -> str:
    """Make the file of --trace; returns its full path. Raises ConfigError, also if it is there and is no trace.

    may_resume   the same command may have begun it: its steps are added to it then
    """
    path = Path(name).absolute()
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            before = file.read(len(TRACE_HEAD))
        is_trace = before == TRACE_HEAD.encode()
        if before and not is_trace:
            raise ConfigError(f"--trace: '{name}' is there, and is not a trace", "name a new file, or remove that one")
        if not (may_resume and is_trace):
            path.write_text(TRACE_HEAD + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace: '{name}' cannot be written ({error.strerror})", "name another file") from None
    return str(path)
