"""A world of real rank processes with a fake agent between them, which relays what they send each other.

`run_world` runs a function in each rank, under our hooks or plain, and meanwhile a scenario that plays the agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from msgspec.structs import asdict

from tests.options import OPTIONS
from tests.rank.fakes import RECORD_BYTES
from tests.rank.processes import run_alone
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.agreement import received_of, sources_of
from ttprun.groups.connection import Exchange
from ttprun.introspect import ownership
from ttprun.protocol import channel, from_rank, to_rank
from ttprun.protocol.board import Board
from ttprun.protocol.channel import Channel, Message
from ttprun.protocol.to_rank import Welcome
from ttprun.rank.bootstrap import hooks, install
from ttprun.rank.bootstrap.presence import Presence

M = TypeVar("M")
Scenario = Callable[["FakeAgent"], None]
LIMIT_S = 100.0  # against hanging
_FOR_EVER = 1 << 30  # a generation that does not end


class FakeAgent:
    """The agent's ends of all lines: relays `put`, notes everything else.

    start   makes a process for a rank: (rank, generation, is it a replacement) -> (pid, our end of its line)
    """

    def __init__(self, size: int, start: Callable[[int, int, bool], tuple[int, Channel]]) -> None:
        self._start = start
        self.pids: list[int] = []
        self.lines: list[Channel] = []
        self.messages: list[tuple[int, Message]] = []
        self.generation = 1
        self.boundary = 0
        self._puts: list[tuple[int, from_rank.Put]] = []
        self._relaying = threading.Lock()
        self._changed = threading.Condition()
        for rank in range(size):
            pid, line = start(rank, self.generation, False)
            self.pids.append(pid)
            self.lines.append(line)
        for rank in range(size):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _listen(self, rank: int) -> None:
        for message in self.lines[rank].messages():
            if isinstance(message, from_rank.Put):
                with self._relaying:
                    self._puts.append((rank, message))
                    for other, line in enumerate(self.lines):
                        if other != rank:
                            line.send(message)
            else:
                if isinstance(message, from_rank.RankUnprotected):  # as the real agent does
                    for other, line in enumerate(self.lines):
                        if other != rank:
                            line.send(message)
                with self._changed:
                    self.messages.append((rank, message))
                    self._changed.notify_all()

    def wait_for(self, rank: int, kind: type[M], **fields: Any) -> M:
        """The first message of a rank of this kind and with these fields, which may have come already."""

        def find() -> M | None:
            of_kind = (m for r, m in self.messages if r == rank and isinstance(m, kind))
            return next((m for m in of_kind if fields.items() <= asdict(m).items()), None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, LIMIT_S), (
                f"no {kind.__name__} {fields} in {self.messages}"
            )
            found = find()
        assert found is not None
        return found

    def break_connections(self) -> list[from_rank.RankFrozen]:
        """A new generation: every rank stops and breaks its connections; returns their reports."""
        return self.freeze(lost=[])

    def freeze(self, lost: list[int]) -> list[from_rank.RankFrozen]:
        """The same without those that are lost."""
        self.generation += 1
        survivors = [rank for rank in range(len(self.lines)) if rank not in lost]
        for rank in survivors:
            self.lines[rank].send(to_rank.Freeze(tuple(survivors), self.generation, tuple(lost)))
        return [self.wait_for(rank, from_rank.RankFrozen, generation=self.generation) for rank in survivors]

    def resume(self, expected: dict[str, list[str]] | None = None) -> None:
        """Let all connect again and issue their journals; a replacement is to issue what is `expected` of it."""
        reports = ((rank, m) for rank, m in self.messages if isinstance(m, from_rank.RankFrozen))
        journals = {rank: m.journal for rank, m in reports if m.generation == self.generation}
        sources = [(name, number, rank) for (name, number), rank in sources_of(journals).items()]
        for rank, line in enumerate(self.lines):
            received = received_of(journals.values()).get(rank, {})
            line.send(to_rank.Resume((), self.generation, self.boundary, expected or {}, sources, received=received))

    def kill(self, rank: int) -> None:
        """A rank is lost."""
        os.kill(self.pids[rank], signal.SIGKILL)
        os.waitpid(self.pids[rank], 0)

    def replace(self, rank: int) -> None:
        """Start a process in a lost rank's place; it waits for its order, and knows what was reported in its generation."""
        with self._relaying:
            self.pids[rank], self.lines[rank] = self._start(rank, self.generation, True)
            for teller, put in self._puts:
                if teller != rank and put.generation >= self.generation:
                    self.lines[rank].send(put)
        threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def send_value(self, rank: int, key: str) -> None:
        """End a rank's `wait_for(key)`."""
        self.lines[rank].send(from_rank.Put(_FOR_EVER, key, ""))

    @staticmethod
    def pause() -> None:
        """Let a rank that has said that it will wait come to its waiting."""
        time.sleep(0.05)


def wait_for(key: str) -> None:
    """In a rank: wait until the scenario has sent it `key`."""
    from ttprun.introspect.current_rank import current

    session = current()
    assert session is not None
    session[Exchange].get(_FOR_EVER, key, LIMIT_S)


def say(text: str) -> None:
    """In a rank: tell the scenario something."""
    from ttprun.introspect.current_rank import current

    session = current()
    assert session is not None
    session.channel.send(from_rank.Note(text))


def run_world(
    function: Callable[..., Any],
    *args: Any,
    scenario: Scenario | None = None,
    size: int = 2,
    is_managed: bool = True,
    is_begun: bool = True,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """What `function(rank, *args)` returns in each rank of a gloo world, which it makes itself if not `is_begun`.

    Raises AssertionError with a rank's traceback, or if a rank has not ended within `limit_s` seconds.
    """
    result: list[Any] = run_alone(
        _drive, function, args, scenario, size, is_managed, is_begun, limit_s, limit_s=3 * limit_s
    )
    return result


def _drive(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    scenario: Scenario | None,
    size: int,
    is_managed: bool,
    is_begun: bool,
    limit_s: float,
) -> list[Any]:
    board_fd, _ = Board.create(size)
    recorders = [Recorder.create(RECORD_BYTES) for _ in range(size)]
    pipes = [Pipe(duplex=False) for _ in range(size)]
    with tempfile.TemporaryDirectory() as run_dir:

        def start(rank: int, generation: int, is_replacement: bool) -> tuple[int, Channel]:
            ours, theirs = channel.pair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                welcome = Welcome(rank, rank, size, size, generation, run_dir, is_replacement, OPTIONS)
                fds = [board_fd, recorders[rank]]
                _be_rank(welcome, theirs, fds, pipes[rank][1], function, args, is_managed, is_begun)
            theirs.close()
            return pid, ours

        agent = FakeAgent(size, start)
        try:
            if scenario is not None:
                scenario(agent)
            results = [_result_of(pipes[rank][0], rank, limit_s) for rank in range(size)]
        finally:
            for pid in agent.pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
    return results


def _result_of(pipe: Connection, rank: int, limit_s: float) -> Any:
    assert pipe.poll(limit_s), f"rank {rank} has not ended"
    is_good, value = pipe.recv()
    assert is_good, f"rank {rank}: {value}"
    return value


def _be_rank(
    welcome: Welcome,
    line: Channel,
    fds: list[int],
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    is_managed: bool,
    is_begun: bool,
) -> None:
    import torch
    import torch.distributed as dist

    rank, size = welcome.rank, welcome.world_size
    try:
        # torch makes its pool of threads anew in a child, at first use: threads of autograd that come there at once
        # find none, and abort. So it is made here, while there is one thread.
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        if is_managed:
            ownership.add_user_directory(os.path.dirname(__file__))
            presence = Presence(line, welcome, fds)
            presence.start()
            install._presence = presence
            if welcome.is_replacement:
                presence.may_start.wait()
            hooks.install(presence)
            hooks.begin_run(presence, presence.welcome.is_replacement)
        if is_begun:
            dist.init_process_group(
                "gloo", init_method=f"file://{welcome.run_dir}/rendezvous", rank=rank, world_size=size
            )
        outcome: tuple[bool, Any] = (True, function(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    threading.Event().wait(LIMIT_S)  # the other rank may still need this one; the driver ends both
    os._exit(0)
