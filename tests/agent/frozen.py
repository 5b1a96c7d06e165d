"""Processes that cannot die: SIGKILL does not reach what the freezer (of cgroups, version 1) holds, as with a process
that waits for a file server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.agent.starting import LIMIT_S

FREEZER = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """A control group of our own. Skips the test where there can be none."""

    def __init__(self) -> None:
        self._group = FREEZER / f"ttprun-test-{os.getpid()}"
        try:
            self._group.mkdir()
        except OSError as error:
            pytest.skip(f"no freezer: {error}")

    def freeze(self, pid: int) -> None:
        """Hold a process in uninterruptible sleep."""
        (self._group / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        """Let it go on: what it was sent reaches it now."""
        self._set("THAWED")

    def remove(self) -> None:
        """Thaw, and wait for the end of what was killed."""
        self.thaw()
        give_up_at_s = time.monotonic() + LIMIT_S
        while (self._group / "cgroup.procs").read_text() and time.monotonic() < give_up_at_s:
            time.sleep(0.01)
        self._group.rmdir()

    def _set(self, state: str) -> None:
        (self._group / "freezer.state").write_text(state)
        give_up_at_s = time.monotonic() + LIMIT_S
        while (self._group / "freezer.state").read_text().strip() != state:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.01)
