"""Fixtures of the agent tests: processes that end with their test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.starting import start_of
from ttprun.agent.processes import RankHandler, kill_session


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
