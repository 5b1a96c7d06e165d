"""A world of real rank processes with a fake agent between them, which relays what they tell each other.

`run_world` runs a function in each rank, under our hooks or plain, and meanwhile a scenario that plays the agent.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tests.rank.fakes import OPTIONS, RECORD_BYTES
from tests.rank.processes import run_alone
from ttprun import channel
from ttprun.board import Board
from ttprun.channel import Channel, Message
from ttprun.rank import frames, install
from ttprun.rank.presence import Presence
from ttprun.rank.recorder import Recorder

Scenario = Callable[["FakeAgent"], None]
LIMIT_S = 25.0
_FOR_EVER = 1 << 30  # a generation that does not end


class FakeAgent:
    """The agent's ends of all lines: relays `put`, notes everything else."""

    def __init__(self, lines: list[Channel]) -> None:
        self.lines = lines
        self.messages: list[tuple[int, Message]] = []
        self.generation = 1
        self.boundary = 0
        self._news = threading.Condition()
        for rank in range(len(lines)):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _listen(self, rank: int) -> None:
        for message in self.lines[rank].messages():
            if message["op"] == "put":
                for other, line in enumerate(self.lines):
                    if other != rank:
                        line.send(message)
            else:
                with self._news:
                    self.messages.append((rank, message))
                    self._news.notify_all()

    def wait_for(self, rank: int, op: str, **fields: Any) -> Message:
        """The first message of a rank with this `op` and these fields, which may have come already."""

        def find() -> Message | None:
            wanted = {"op": op} | fields
            return next((m for r, m in self.messages if r == rank and wanted.items() <= m.items()), None)

        with self._news:
            assert self._news.wait_for(lambda: find() is not None, LIMIT_S), f"no {op} {fields} in {self.messages}"
            found = find()
        assert found is not None
        return found

    def tell_all(self, **message: Any) -> None:
        for line in self.lines:
            line.send(message)

    def break_connections(self) -> list[Message]:
        """A new generation: every rank stops and breaks its connections; returns their reports."""
        self.generation += 1
        everybody = list(range(len(self.lines)))
        self.tell_all(op="freeze", generation=self.generation, lost=[], survivors=everybody)
        return [self.wait_for(rank, "frozen", generation=self.generation) for rank in everybody]

    def resume(self) -> None:
        """Let all connect again and issue their journals."""
        self.tell_all(op="resume", generation=self.generation, boundary=self.boundary, expected={}, skip_lines=[0, 0])

    def tell_value(self, rank: int, key: str) -> None:
        """End a rank's `wait_for(key)`."""
        self.lines[rank].send({"op": "put", "generation": _FOR_EVER, "key": key, "value": ""})

    @staticmethod
    def pause() -> None:
        """Let a rank that has said that it will wait come to its waiting."""
        time.sleep(0.05)


def wait_for(key: str) -> None:
    """In a rank: wait until the scenario has told it `key`."""
    from ttprun.rank.session import current

    session = current()
    assert session is not None
    session.exchange.get(_FOR_EVER, key, LIMIT_S)


def say(text: str) -> None:
    """In a rank: tell the scenario something."""
    from ttprun.rank.session import current

    session = current()
    assert session is not None
    session.channel.send({"op": "note", "text": text})


def run_world(
    function: Callable[..., Any],
    *args: Any,
    scenario: Scenario | None = None,
    size: int = 2,
    is_managed: bool = True,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """What `function(rank, *args)` returns in each rank of a gloo world.

    Raises AssertionError with a rank's traceback, or if a rank has not ended within `limit_s` seconds.
    """
    result: list[Any] = run_alone(_drive, function, args, scenario, size, is_managed, limit_s, limit_s=3 * limit_s)
    return result


def _drive(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    scenario: Scenario | None,
    size: int,
    is_managed: bool,
    limit_s: float,
) -> list[Any]:
    lines = [channel.pair() for _ in range(size)]
    pipes = [Pipe(duplex=False) for _ in range(size)]
    board_fd, _ = Board.create(size)
    pids = []
    with tempfile.TemporaryDirectory() as run_dir:
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, size, lines[rank][1], board_fd, pipes[rank][1], run_dir, function, args, is_managed)
            pids.append(pid)
        try:
            agent = FakeAgent([ours for ours, _ in lines])
            if scenario is not None:
                scenario(agent)
            results = [_result_of(pipes[rank][0], rank, limit_s) for rank in range(size)]
        finally:
            for pid in pids:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    return results


def _result_of(pipe: Connection, rank: int, limit_s: float) -> Any:
    assert pipe.poll(limit_s), f"rank {rank} has not ended"
    is_good, value = pipe.recv()
    assert is_good, f"rank {rank}: {value}"
    return value


def _be_rank(
    rank: int,
    size: int,
    line: Channel,
    board_fd: int,
    pipe: Connection,
    run_dir: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    is_managed: bool,
) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.manual_seed(rank)
        if is_managed:
            welcome = {
                "op": "welcome", "rank": rank, "local_rank": rank, "world_size": size, "local_world_size": size,
                "generation": 1, "run_dir": run_dir, "is_replacement": False, "faults": [], "options": dict(OPTIONS),
            }  # fmt: skip
            frames.add_user_directory(os.path.dirname(__file__))
            presence = Presence(line, welcome, [board_fd, Recorder.create(RECORD_BYTES)])
            presence.start()
            install._presence = presence
            install._install_hooks(presence)
        dist.init_process_group("gloo", init_method=f"file://{run_dir}/rendezvous", rank=rank, world_size=size)
        outcome: tuple[bool, Any] = (True, function(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    threading.Event().wait(LIMIT_S)  # the other rank may still need this one; the driver ends both
    os._exit(0)
