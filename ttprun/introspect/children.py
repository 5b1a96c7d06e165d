"""The processes that a rank forks are noted in a file of the run, for the agent: it removes what a killed one has left.

A DataLoader's worker that is killed between the making and the unlinking of a shared-memory file leaves that file, and
the kernel records nowhere whose it was. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

NAME = "children"
SHARED_MEMORY = Path("/dev/shm")
_TRACKER = "from multiprocessing.resource_tracker import main"
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")  # pid of the maker, a random number, a counter


def note(run_dir: str) -> None:
    """This process is a child of a rank; called in it. Raises nothing."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(run_dir, NAME), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{os.getpid()}\n".encode())
        finally:
            os.close(fd)


def wrap_spawnv_passfds(original: Any) -> Any:
    """multiprocessing.util.spawnv_passfds: Python's resource tracker gets a process group of its own.

    It ends by itself once nobody is left who has its pipe; killed with its rank it would leave named semaphores behind.
    """

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> Any:
        *others, command = args
        if isinstance(command, str) and command.startswith(_TRACKER):
            args = [*others, f"import os; os.setpgrp(); {command}"]
        return original(path, args, passfds)

    return spawnv_passfds


def remove_left_files(run_dir: Path, ranks: set[int], shared_memory: Path = SHARED_MEMORY) -> tuple[list[str], bool]:
    """Remove the shared-memory files of torch that dead processes of this run have left. Raises nothing.

    ranks     pids of ranks of this run, past ones too
    returns   (names that were removed, whether there are more whose makers are about to die)
    """
    removed: list[str] = []
    is_more = False
    with contextlib.suppress(OSError):
        names = {name: match for name in os.listdir(shared_memory) if (match := _OF_TORCH.fullmatch(name))}
        ours = (_noted(run_dir) | ranks) if names else set()
        for name, match in names.items():
            maker = int(match[1])
            if maker not in ours:
                continue
            if is_alive(maker):
                is_more = True
            elif _remove(shared_memory / name):
                removed.append(name)
    return removed, is_more


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _noted(run_dir: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(line) for line in (run_dir / NAME).read_text(encoding="ascii").split() if line.isdigit()}
    return set()


def _remove(path: Path) -> bool:
    """Remove a file if it is our user's, and in nobody's memory: it may have been passed on before its maker died."""
    with contextlib.suppress(OSError):
        if path.lstat().st_uid == os.getuid() and not _is_mapped(path):
            path.unlink()
            return True
    return False


def _is_mapped(path: Path) -> bool:
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):
                if str(path) in Path(f"/proc/{process}/maps").read_text(errors="replace"):
                    return True
    return False
