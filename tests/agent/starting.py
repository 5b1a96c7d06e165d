"""Start processes as the agent does, and wait for what they come to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.waits import becomes_ready
from ttprun.agent.node.rank_processes import Standby

ROOT = str(Path(__file__).resolve().parents[2])
LIMIT_S = 100.0


def start_of(tmp_path: Path, *words: str, is_redirected: bool = False, entry: str = sys.executable) -> dict[str, Any]:
    """What torch gives a subprocess handler."""
    logs = {name: str(tmp_path / name) if is_redirected else None for name in ("stdout", "stderr")}
    return {
        "entrypoint": entry,
        "args": words,
        "env": {"PYTHONPATH": ROOT},
        **logs,
        "local_rank_id": 0,
        "numa_options": None,
    }


def wait_for_end(pid: int) -> bool:
    """Whether a process, of whatever parent, ends."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return becomes_ready(fd)
    finally:
        os.close(fd)


def wait_until_ready(standby: Standby) -> None:
    """Blocks until it has imported what it was to import."""
    while not standby.is_ready:
        standby.read()
