"""A step, a collective and a recovery, part by part: tables of stages, and moments that a listener is told of.

A stage has a name, a function, and why it stands where it stands. The order is the table's: tests/rank/test_stages.py
says what goes wrong if two are exchanged.

Fault injection is a listener (`ttprun.chaos.strikes`). Without one a moment costs one comparison. Begin with `Stage`
and `reached`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
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


listener: Listener | None = None


def reached(moment: str) -> None:
    """Report a moment to the listener."""
    if listener is not None:
        listener.reached(moment)


def reached_step_end() -> None:
    """Report the end of Optimizer.step to the listener."""
    if listener is not None:
        listener.reached_step_end()


def reached_collective(op: str, inputs: Any) -> bool:
    """Report a collective to the listener; returns whether this rank is to skip it."""
    return listener is not None and listener.reached_collective(op, inputs)


def stop_at_next_line(
    frame: FrameType | None,
    others: tuple[str, ...],
    debug: str,
    has_nan: Callable[[FrameType], bool],
    leave: Callable[[], None],
) -> None:
    """Stop at the script's next line, as `to_rank.Replay.debug` says; not at once, as torch's modes are off in a hook.

    frame    of the caller
    others   beginnings of paths of files that are not the script's
    has_nan  whether a variable of a frame holds a NaN
    leave    called when the debugger is left with `quit`
    """

    def at_line(stopped: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or (debug == "nan" and not has_nan(stopped)):
            return at_line
        sys.settrace(None)
        if debug in ("pdb", "nan"):
            import pdb  # not before: it imports what a script may have a file of the same name for

            debugger: Any = pdb.Pdb(nosigint=True)
            debugger.set_quit = leave
            debugger.set_trace(stopped)
            return debugger.trace_dispatch(stopped, event, argument)
        code = compile(Path(debug).read_text(encoding="utf-8"), debug, "exec")
        exec(code, stopped.f_globals, stopped.f_locals)  # in here Python takes over new values of variables
        return None

    def of_call(called: FrameType, *_: Any) -> Any:
        return at_line if debug == "nan" and not called.f_code.co_filename.startswith(others) else None

    while frame is not None:
        if not frame.f_code.co_filename.startswith(others):
            frame.f_trace = at_line
        frame = frame.f_back
    sys.settrace(of_call)
