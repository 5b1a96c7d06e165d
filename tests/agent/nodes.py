"""Nodes and parts of the agent, made for tests."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.spare_pool import Listener, SparePool
from ttprun.agent.between import rendezvous
from ttprun.agent.between.agent import Agent
from ttprun.agent.lead.rows import Row
from ttprun.agent.node.node import Process
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.rank_events import Event

LIMIT_S = 60.0
ALIKE = {"ttprun": "1.0", "the script": "abc"}


def ignore(event: Event) -> None: ...


class Blind:
    """Nothing of this node is seen, but by messages."""

    def state_of(self, rank: int) -> tuple[str, float]:
        return "", 0.0

    def newest(self, rank: int) -> int | None:
        return None


class NothingFails:
    """Parts that have no bug: what they raise is the test's to see."""

    def run(self, part: str, work: Callable[[], Any]) -> Any:
        return work()

    look = run

    def note(self, part: str, error: Exception) -> None:
        raise error


class Store:
    """What is used of a rendezvous store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            return number

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), limit.total_seconds()):
                raise RuntimeError("wait timeout")


class Lead:
    """The agent that leads two nodes, of which the second is lost; its supervisor's loop runs here."""

    def __init__(self) -> None:
        listener = Listener("127.0.0.1", rendezvous.KNOWN)
        self.where, pool = listener.where, SparePool(listener, ALIKE)
        names = {0: "127.0.0.1", 1: "10.0.0.2"}
        self.peers = Peers(0, "127.0.0.1", 2, {}, names, 2, pool, "10.0.0.1 29500")
        self.selector = selectors.DefaultSelector()
        self.came: list[str] = []
        self.peers.watch(self.selector, lambda node, message: None, lambda node, why: None, self.came.append)

    def run(self, is_done: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < ends_s
            for key, _ in self.selector.select(0.05):
                key.data()


def node_of(directory: Path, *slots: Process, advance: Callable[[Event], None] = ignore, **config: Any) -> Agent:
    """A node with these processes, as far as they are started."""
    job = recovery.new_job(recovery.Settings(world_size=max(1, len(slots))))
    node = Agent(Config(**config), RunDirectory(directory), True, job)
    node.advance = node.report = advance  # type: ignore[assignment]
    node.eyes = Blind()  # type: ignore[assignment]
    if slots:
        node.peers = Peers(ranks_per_node=len(slots))
    node.here = list(slots)
    node.slots = [Row(slot.rank, slot.local_rank, lambda *_: None) for slot in slots]
    return node


T = TypeVar("T")


def part(kind: type[T], node: Any, **others: Any) -> T:
    """A part of the agent that uses these others; whatever else it has is None."""
    nobody = {field.name: None for field in fields(kind) if field.init}  # type: ignore[arg-type]
    return kind(**nobody | {"node": node} | others)
