"""Start a real interpreter on a user's script, with the shim and a fake agent at the other end of its line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.options import OPTIONS
from tests.rank.fakes import RECORD_BYTES
from ttprun.agent.base import stack_dumps
from ttprun.agent.node.rank_processes import rank_environment
from ttprun.capture.records.recorder import Recorder
from ttprun.protocol import channel
from ttprun.protocol.board import Board
from ttprun.protocol.channel import Channel
from ttprun.protocol.to_rank import Welcome
from ttprun.rank.bootstrap.install import CHANNEL_VARIABLE

ROOT = str(Path(__file__).resolve().parents[2])
LIMIT_S = 100


@dataclass
class Outcome:
    """How a process has ended, what it printed (both streams), and what it reported to the agent."""

    code: int
    printed: str
    messages: list[Any] = field(default_factory=list)


def environment(**more: str) -> dict[str, str]:
    """This process's, with our package on the path and nothing of another run's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("_TTPRUN", "PYTEST"))}
    return kept | {"PYTHONPATH": ROOT} | more


def run_plain(words: list[str], directory: Path, **more: str) -> Outcome:
    """`python WORDS`, as torchrun starts it."""
    done = subprocess.run(
        [sys.executable, "-u", *words], cwd=directory, env=environment(**more), text=True, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout)


def welcome_of(directory: Path, **more: Any) -> Welcome:
    """What the agent sends first; see Watch.welcome."""
    return replace(Welcome(0, 0, 1, 1, 1, str(directory), is_replacement=False, options=OPTIONS), **more)


def run_under_shim(
    words: list[str], directory: Path, stdin: str = "", flags: tuple[str, ...] = ("-u",), variables: dict[str, str] | None = None,
    **welcome: Any,
) -> Outcome:  # fmt: skip
    """`python WORDS` as our agent starts it, welcomed as rank 0 of 1."""
    ours, theirs = channel.pair()
    variables = rank_environment(environment(**(variables or {})), str(directory)) | {
        CHANNEL_VARIABLE: str(theirs.fileno())
    }
    process = subprocess.Popen(
        [sys.executable, *flags, *words], cwd=directory, env=variables, pass_fds=(theirs.fileno(),), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    theirs.close()
    board_fd, _ = Board.create(welcome.get("local_world_size", 1))
    record_fd = Recorder.create(RECORD_BYTES)
    stack_fd = stack_dumps.create()
    ours.send(welcome_of(directory, **welcome), [board_fd, record_fd, stack_fd])
    result = Outcome(0, "")
    listener = threading.Thread(target=_listen, args=(ours, result), daemon=True)
    listener.start()
    try:
        result.printed, _ = process.communicate(stdin, timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
        os.close(board_fd)
        os.close(record_fd)
        os.close(stack_fd)
    result.code = process.returncode
    listener.join(LIMIT_S)
    ours.close()
    return result


def _listen(line: Channel, result: Outcome) -> None:
    result.messages.extend(line.messages())
