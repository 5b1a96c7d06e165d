"""Find torch in a process without our hooks, from what /proc shows.

Standard library only. The agent looks from outside, since a Python that has skipped our `sitecustomize` reports
nothing; a rank that has connected to the agent looks at itself, and at its children. Begin with `why`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttprun.rank.process.after_import import is_overdue

_LIBRARIES = (b"/libtorch_cpu.so", b"/libtorch.so", b"/libtorch_python.so")
_WITH_VALUE = "WXcm"  # options of Python that take the rest of the word as a value
_SKIPPING = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "runs no sitecustomize"}


def why() -> str:
    """Why this process trains without hooks; "" if it is hooked, or does not seem to train."""
    if is_overdue("torch"):
        return "torch was imported by an import hook placed before ttprun's: install that hook after `import torch`"
    return why_in_child(os.getpid())


def why_in_child(pid: int) -> str:
    """Why a process is unprotected because a child of it has torch; "" if none has."""
    if has_torch(pid):
        return ""
    child = next(filter(has_torch, descendants(pid)), None)
    if child is None:
        return ""
    return (
        f"it does not use torch itself, but its child process does ({command_of(child)}), and children of ranks are "
        "not hooked: give ttprun the training script itself, or start it with `exec` and --no-python"
    )


def has_torch(pid: int) -> bool:
    """Whether a process has torch's libraries loaded; False if there is no such process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
    return any(library in maps for library in _LIBRARIES)


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
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
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


def why_skipped(words: Sequence[str]) -> str:
    """Which option in Python's command line keeps it from loading our `sitecustomize`; "" if none does."""
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            return ""
        for letter in word[1:]:
            if letter in _SKIPPING:
                return f"its Python was started with -{letter}, which {_SKIPPING[letter]}: leave that option out"
            if letter in _WITH_VALUE:
                break
        if "c" in word or "m" in word:
            return ""
    return ""
