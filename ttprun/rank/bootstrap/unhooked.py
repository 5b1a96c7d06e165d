"""Find torch in a process without our hooks, from what /proc shows.

Standard library only. The agent looks from outside, since a Python that has skipped our `sitecustomize` reports
nothing; a rank that has connected to the agent looks at itself, and at its children. Begin with `why`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from ttprun.introspect.patching import is_overdue
from ttprun.protocol.reason import Reason

_LIBRARIES = (b"/libtorch_cpu.so", b"/libtorch.so", b"/libtorch_python.so")
IMPORT_CPU_S = 20.0  # no import of torch takes as much of the processor, however long it takes
_LISTENING = "0A"  # in /proc/net/tcp
_WITH_VALUE = "WXcm"  # options of Python that take the rest of the word as a value
_SKIPPING = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "runs no sitecustomize"}


def why() -> Reason:
    """Why this process trains without hooks; "" if it is hooked, or does not seem to train."""
    if is_overdue("torch"):
        return Reason(
            "hooks-missing",
            "torch was imported by an import hook placed before ttprun's: install that hook after `import torch`",
        )
    return why_in_child(os.getpid())


def why_in_child(pid: int) -> Reason:
    """Why a process is unprotected because a child of it has torch; "" if none has."""
    if has_torch(pid):
        return Reason()
    child = next(filter(seems_to_train, descendants(pid)), None)
    if child is None:
        return Reason()
    return Reason(
        "hooks-missing",
        f"it does not use torch itself, but its child process does ({command_of(child)}), and children of ranks are "
        "not hooked: give ttprun the training script itself, or start it with `exec` and --no-python",
    )


def why_in_ranks_of_its_own(pid: int) -> Reason:
    """Why a process that has torch, and has taken no step, is unprotected; "" if it may still train itself.

    Children of it are ranks: one has torch and listens, as each member of a process group does. DataLoader workers,
    downloads and processes that prepare data do not.
    """
    if has_connection(pid):
        return Reason()
    inherited = _sockets(pid)
    child = next((other for other in descendants(pid) if has_torch(other) and _listens(other, inherited)), None)
    if child is None:
        return Reason()
    return Reason(
        "hooks-missing",
        f"it has started the ranks itself ({command_of(child)}), as torch.multiprocessing.spawn does, and children of "
        "ranks are not hooked: leave that call out, and have ttprun start them (ttprun guide migrate)",
    )


def has_torch(pid: int) -> bool:
    """Whether a process has torch's libraries loaded; False if there is no such process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
    return any(library in maps for library in _LIBRARIES)


def seems_to_train(pid: int) -> bool:
    """Whether a process has torch and has used it: it holds a connection, or has computed for longer than an import."""
    return has_torch(pid) and (has_connection(pid) or cpu_s(pid) > IMPORT_CPU_S)


def has_connection(pid: int) -> bool:
    """Whether a process holds a TCP socket, as each rank of a process group does."""
    sockets = _sockets(pid)
    return any(inode in sockets for _, inode in _tcp(pid))


def _listens(pid: int, inherited: Set[str]) -> bool:
    """Whether a process listens on a TCP socket that is not one of these."""
    sockets = _sockets(pid) - inherited
    return any(state == _LISTENING and inode in sockets for state, inode in _tcp(pid))


def _sockets(pid: int) -> set[str]:
    """What a process holds open, as /proc names it."""
    sockets = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(fd))
    return sockets


def _tcp(pid: int) -> Iterator[tuple[str, str]]:
    """(state, name as in `_sockets`) of each TCP socket in a process's network."""
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                cells = row.split()
                yield cells[3], f"socket:[{cells[9]}]"


def cpu_s(pid: int) -> float:
    """Processor time that a process has used; 0 if there is no such process."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def image_of(pid: int) -> str:
    """What is another one once a process has executed another program: where its stack is; "" if it is not known."""
    fields = _stat(pid)
    return fields[25] if fields and fields[25] != "0" else ""


def environment_of(pid: int) -> dict[str, str]:
    """What a program has been started with; {} if there is no such process."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> Iterator[int]:
    """A process's children, and theirs."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another one that still lives."""
    while pid > 1:
        if pid == ancestor:
            return True
        fields = _stat(pid)
        if not fields:
            return False
        pid = int(fields[1])
    return False


def words_of(pid: int) -> list[str]:
    """A process's command line; [] if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def command_of(pid: int) -> str:
    """A process's command line, short enough for a message."""
    words = " ".join(words_of(pid))
    return f"pid {pid}: {words if len(words) <= 160 else words[:157] + '...'}"


def why_skipped(words: Sequence[str]) -> Reason:
    """Which option in Python's command line keeps it from loading our `sitecustomize`; "" if none does."""
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            return Reason()
        for letter in word[1:]:
            if letter in _SKIPPING:
                return Reason(
                    "hooks-missing",
                    f"its Python was started with -{letter}, which {_SKIPPING[letter]}: leave that option out",
                )
            if letter in _WITH_VALUE:
                break
        if "c" in word or "m" in word:
            return Reason()
    return Reason()
