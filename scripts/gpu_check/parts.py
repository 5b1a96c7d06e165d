"""What a check is made of: parts with letters, their tasks, and the rows that these come to. Begin with `Part`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "FAILED", "seen", "left out"]


class NotDoneError(Exception):
    """A task could not be done.

    details  as of a Row
    """

    def __init__(self, why: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.details = details


@dataclass(frozen=True)
class Row:
    """One line of the report.

    verdict  "ok" or "FAILED" where something must be so; "seen": a fact or a figure; "left out": not tried
    found    what was seen, in a sentence
    details  what somebody needs who looks for the cause: lines of logs
    values   the same for programs
    """

    what: str
    verdict: Verdict
    found: str
    details: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Something that is tried, in processes of its own.

    limit_s  that it may take at most
    do       tries it; given the seconds that it has, which are less if the part or the whole ends before
    """

    name: str
    limit_s: float
    do: Callable[[float], Iterable[Row]]


@dataclass(frozen=True)
class Place:
    """What the ranks of a check train on.

    kind     "cuda", "npu" or "cpu"
    names    of the devices that torch can use; empty on the CPU
    shares   whether all ranks use the first device
    ranks    of each job
    folder   keeps the runs
    patience factor of all limits, for a slow machine
    """

    kind: str
    names: tuple[str, ...]
    shares: bool
    ranks: int
    folder: Path
    patience: float = 1.0

    @property
    def backend(self) -> str:
        """What the ranks communicate by."""
        return {"cuda": "nccl", "npu": "hccl"}.get(self.kind, "gloo")


@dataclass(frozen=True)
class Part:
    """One part of the check.

    limit_s   from its first task's start to its last one's end
    is_alone  it measures times: nothing else runs meanwhile, and its tasks run one after the other
    tasks     what it does in a place; a reason instead, if it makes no sense there
    """

    letter: str
    title: str
    limit_s: float
    is_alone: bool
    tasks: Callable[[Place], list[Task] | str]
