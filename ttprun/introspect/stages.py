"""A step, a collective and a recovery, part by part: tables of stages, and moments that listeners are told of.

A stage has a name, a function, and why it stands where it stands. The order is the table's: tests/rank/test_stages.py
says what goes wrong if two are exchanged.

Fault injection is a listener (`ttprun.chaos.strikes`). Without one a moment costs one look at an empty list. Begin
with `Stage` and `reached`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

_C = TypeVar("_C")


class Stage(NamedTuple, Generic[_C]):
    """One of the things that happen.

    act       called with what all stages of the table know; where a table can end early: whether it ends here
    why_here  what must have happened before, or not yet
    """

    name: str
    act: Callable[[_C], Any]
    why_here: str


class Listener(Protocol):
    """Is called at each moment. Any method may end the process, or raise what is meant for the script."""

    def reached(self, moment: str) -> None:
        """A thread has reached a moment; the names are those of `ttprun.chaos.injected_faults`."""

    def reached_step_end(self) -> None:
        """Optimizer.step has ended."""

    def reached_collective(self, op: str, inputs: Any) -> bool:
        """A collective is about to be issued; returns whether this rank is to skip it.

        op       the backend's method
        inputs   the argument that holds this rank's input tensors
        """

    def connected(self, exchange: Any, connection: Any, group_name: str, rank: int) -> None:
        """A process group has a new connection.

        exchange     the Exchange by which ranks tell each other of it
        connection   the Connection that was just made
        group_name   the same in all ranks of the group
        rank         this rank's, in the group
        """


listeners: list[Listener] = []


def reached(moment: str) -> None:
    """Report a moment to the listeners."""
    for listener in listeners:
        listener.reached(moment)


def reached_step_end() -> None:
    """Report the end of Optimizer.step to the listeners."""
    for listener in listeners:
        listener.reached_step_end()


def reached_collective(op: str, inputs: Any) -> bool:
    """Report a collective to the listeners; returns whether this rank is to skip it."""
    return any(listener.reached_collective(op, inputs) for listener in listeners)
