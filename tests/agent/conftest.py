"""Fixtures of the agent tests: processes that end with their test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.agent.encoded import EncodedWire
from tests.agent.nodes import Lead
from tests.agent.starting import LIMIT_S, start_of
from tests.options import OPTIONS
from ttprun.agent.base import stack_dumps
from ttprun.agent.launcher import group
from ttprun.agent.node.rank_processes import RankHandler, Standby, StandbyCopy, StandbyHandler, kill_session
from ttprun.protocol.board import Board
from ttprun.protocol.to_rank import Resume, Welcome


@pytest.fixture(autouse=True)
def encode_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's own node and what is decided there know each other by messages alone."""
    monkeypatch.setattr(group, "Wire", EncodedWire)


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
    """`become_rank(process, script, **variables)`: it runs the script as a rank; exit code, and what it has written."""
    fds: list[int] = []

    def become(process: Standby | StandbyCopy, script: str, **variables: str) -> tuple[int, str]:
        (tmp_path / "script.py").write_text(script)
        words = [str(tmp_path / "script.py"), "--lr", "1"]
        handler = StandbyHandler(start_of(tmp_path, "-u", *words, is_redirected=True), process)
        fds.extend((Board.create(1)[0], os.memfd_create("record"), stack_dumps.create()))
        os.ftruncate(fds[-2], 128 << 20)
        environment = {"ROLE": "mine", "PATH": os.environ["PATH"], **variables}
        options = replace(OPTIONS, may_rerun=False)
        welcome = Welcome(0, 0, 1, 1, 2, str(tmp_path), True, options, arguments=words, env=environment)
        handler.channel.send(welcome, [*fds[-3:], *handler.outputs()])
        handler.channel.send(Resume((), 2, boundary=0))
        code = handler.proc.wait(LIMIT_S)
        handler.close(signal.SIGKILL)
        handler.channel.close()
        return code, (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()

    yield become
    for fd in fds:
        os.close(fd)


@pytest.fixture
def lead() -> Iterator[Lead]:
    found = Lead()
    yield found
    found.peers.close(found.selector)
    found.selector.close()
