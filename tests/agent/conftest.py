"""Fixtures of the agent tests: processes that end with their test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.starting import LIMIT_S, start_of
from ttprun.agent import stacks
from ttprun.agent.processes import Copy, RankHandler, Standby, StandbyHandler, kill_session
from ttprun.protocol.board import Board


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., RankHandler]]:
    """`started(*words)`: a rank's process; ended with the test."""
    handlers: list[RankHandler] = []

    def start(*words: str, is_new: bool = True, is_python: bool = True, **how: Any) -> RankHandler:
        handlers.append(RankHandler(start_of(tmp_path, *words, **how), str(tmp_path), is_new, is_python))
        return handlers[-1]

    yield start
    for handler in handlers:
        kill_session(handler.proc.pid)
        handler.proc.wait()
        handler.close(signal.SIGKILL)
        handler.channel.close()


@pytest.fixture
def become_rank(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """`become_rank(process, script)`: it runs the script as a rank; its exit code, and what it has written."""
    fds: list[int] = []

    def become(process: Standby | Copy, script: str) -> tuple[int, str]:
        (tmp_path / "script.py").write_text(script)
        words = [str(tmp_path / "script.py"), "--lr", "1"]
        handler = StandbyHandler(start_of(tmp_path, "-u", *words, is_redirected=True), process)
        fds.extend((Board.create(1)[0], os.memfd_create("record"), stacks.create()))
        os.ftruncate(fds[-2], 128 << 20)
        welcome = {
            "op": "welcome", "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "generation": 2,
            "run_dir": str(tmp_path), "is_replacement": True, "faults": [], "arguments": words,
            "env": {"ROLE": "mine", "PATH": os.environ["PATH"]},
            "options": {
                "user_paths": [], "prints_traceback": True, "record_limit_mib": 1, "journal_limit_mib": 1,
                "allow_faults": False, "may_rerun": False, "mindio": False, "retry_on": [], "device_errors": {}, "keeps_state": False,
                "shelves": [], "own_state": [], "snapshot_every_steps": 0, "commit_timeout_s": 5.0, "is_replaced": True, "verify_every": 0, "nan_limit_s": None,
            },
        }  # fmt: skip
        handler.channel.send(welcome, [*fds[-3:], *handler.outputs()])
        order = {"op": "resume", "generation": 2, "boundary": 0, "expected": {}, "skip_lines": [0, 0]}
        handler.channel.send(order)
        code = handler.proc.wait(LIMIT_S)
        handler.close(signal.SIGKILL)
        handler.channel.close()
        return code, (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()

    yield become
    for fd in fds:
        os.close(fd)
