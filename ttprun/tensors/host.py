"""What the tensors' part needs of whoever uses it; in a rank that is its Host (rank/session.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, TypeVar

from ttprun.introspect import host
from ttprun.protocol.board import Board, Phase
from ttprun.protocol.reason import Reason

_T = TypeVar("_T")


class Exporting(Protocol):
    """The records that outlive this process: capture/records/recorder.py."""

    evidence: Any

    def export(self, boundary: int) -> dict[str, Any]: ...


class Training(Protocol):
    """The training around the tensors."""

    def made(self, what: str, cure: str, is_kept: Callable[[], bool], frame: FrameType | None) -> None:
        """The script makes something, perhaps inside its loop, which a replay would not make.

        what      with its verb: "an optimizer was made"
        cure      what the user can do
        is_kept   called later: whether it still exists
        frame     that makes it, of the calling thread
        """


class Line(Protocol):
    """Where a rank's messages go."""

    def send(self, message: Any, fds: Any = ()) -> None: ...


class Host(Protocol):
    """The process that trains.

    applied               number of the newest boundary
    unprotected           why nothing is repaired, none if something is
    is_holding            its main thread is stopped before the commit
    has_collective_steps  its optimizers communicate in step()
    """

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def board(self) -> Board: ...
    @property
    def channel(self) -> Line: ...
    @property
    def applied(self) -> int: ...
    @property
    def unprotected(self) -> Reason: ...
    @property
    def is_holding(self) -> bool: ...
    @property
    def has_collective_steps(self) -> bool: ...
    @property
    def changed(self) -> threading.Condition: ...
    @property
    def training(self) -> Training: ...
    def __getitem__(self, kind: type[_T]) -> _T: ...
    def touch(self, phase: Phase) -> None: ...


def current() -> Host | None:
    """This process's host; None if it has none."""
    session: Host | None = host.current()
    return session
