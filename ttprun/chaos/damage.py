"""What each kind of fault does to this process. Signals, memory errors and sockets are real.

Standard library only when imported, since a fault can strike before the script has torch. Begin with `strike`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttprun.chaos.injected_faults import DEVICE_KINDS, FLIP_KINDS, Fault
from ttprun.protocol import from_rank
from ttprun.rank import held_signals

if TYPE_CHECKING:
    from ttprun.introspect.current_rank import Rank
    from ttprun.protocol.channel import Channel

EXIT_CODE = 1
_DEED_LIMIT_S = 10.0
_FOREVER_S = 10 * 365 * 86400.0
_C_SLEEP_S = 1 << 30


class InjectedFaultError(RuntimeError):
    """The exception that `inject-fault exception` raises in the script."""

    is_meant_for_script = True


@dataclass(frozen=True)
class Armed:
    """A fault that waits for its moment in this rank; the agent identifies it by its number."""

    number: int
    fault: Fault


def strike(session: Rank, armed: Armed, phase: str) -> None:
    """Cause a fault now, and report it to the agent. Returns if the process survives.

    session   of this rank
    armed     disarmed already, so that it strikes once
    phase     the one in which it strikes, a key of PHASES
    """
    cause(session.channel, armed, phase, step_of(session, phase), session)


def step_of(session: Rank, phase: str) -> int:
    """The optimizer step that this rank is in; at "after_step" still the one that has just ended."""
    return session.applied - (phase == "after_step")


def cause(channel: Channel, armed: Armed, phase: str, step: int, session: Rank | None) -> None:
    """As `strike`, with the step given; for a moment in which the script may not have imported torch yet.

    step      optimizer step, from 0, for the report
    session   None without torch: only faults that end or stop the process are caused then

    A fault that ends or stops the process is reported first; others afterwards, with what was done or why it failed.
    """
    fault = armed.fault
    if fault.kind in _ENDING:
        report(channel, armed, phase, step)
        _ENDING[fault.kind](fault, phase)
    elif fault.kind in _BY_AGENT:
        _done.clear()
        report(channel, armed, phase, step)
        _wait_for_agent()
        if fault.kind == "term":
            held_signals.wait_while_meant_alone(signal.SIGTERM)  # or it would die some steps later
    elif session is not None:
        try:
            detail = _break_something(session, fault)
        except Exception as error:  # a fault that could not be caused must not disturb the script
            channel.send(from_rank.FaultFailed(armed.number, str(error)))
        else:
            report(channel, armed, phase, step, detail)


def report(channel: Channel, armed: Armed, phase: str, step: int, detail: str = "") -> None:
    """Report to the agent that a fault has struck; the clock is the same in all processes of the machine.

    phase, step   where it strikes, as for `cause`
    detail        what was done, for the event log; "" if the kind says it all
    """
    channel.send(from_rank.FaultStruck(armed.number, phase, step, at_s=time.monotonic(), detail=detail))


# What ends or stops the process, or its main thread.


def _raise(fault: Fault, phase: str) -> None:
    raise InjectedFaultError(f"injected by ttprun in phase {phase}")


def _leave(fault: Fault, phase: str) -> None:
    if phase != "replay":
        raise SystemExit(0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _segv(fault: Fault, phase: str) -> None:
    write_no_core()
    ctypes.string_at(0)


def _abort(fault: Fault, phase: str) -> None:
    write_no_core()
    os.abort()


def write_no_core() -> None:
    """Switch core files off for an injected crash."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _deadlock(fault: Fault, phase: str) -> None:
    libc = ctypes.PyDLL(None)  # calls through it keep the GIL
    if fault.seconds is not None:
        libc.usleep(int(fault.seconds * 1e6))
        return
    while True:
        libc.sleep(_C_SLEEP_S)


def _turn(fault: Fault, phase: str) -> None:
    end = time.monotonic() + (_FOREVER_S if fault.seconds is None else fault.seconds)
    while time.monotonic() < end:
        pass


_ENDING: dict[str, Callable[[Fault, str], None]] = {
    "kill": lambda fault, phase: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda fault, phase: os._exit(EXIT_CODE if fault.code is None else fault.code),
    "exception": _raise,
    "segv": _segv,
    "abort": _abort,
    "stop": lambda fault, phase: os.kill(os.getpid(), signal.SIGSTOP),  # the agent ends it, if it has a duration
    "leave": _leave,
    "sleep": lambda fault, phase: time.sleep(_FOREVER_S if fault.seconds is None else fault.seconds),
    "deadlock": _deadlock,
    "busy": _turn,
    "skip-collective": lambda fault, phase: None,  # the caller skips it
}

# Done by the agent while this thread waits, so that it happens at the requested moment.
_BY_AGENT = ("term", "agent-kill", "standby-kill", "stall", "preempt")
_done = threading.Event()


def done_by_agent() -> None:
    """The agent has done its part of a fault."""
    _done.set()


def _wait_for_agent() -> None:
    end = time.monotonic() + _DEED_LIMIT_S
    while not _done.wait(0.1) and time.monotonic() < end:
        pass  # wait in short pieces, so that the script's own signal handler can run


# What breaks devices, links or data.


def _break_something(session: Rank, fault: Fault) -> str:
    from ttprun.chaos import broken

    if fault.kind in DEVICE_KINDS:
        return broken.break_device(fault.kind)
    if fault.kind == "worker-kill":
        return _kill_worker()
    if fault.kind in FLIP_KINDS:
        return broken.flip_bit(fault.seed or 0, is_state=fault.kind == "flip-state")
    return broken.break_links(session, fault)


def _kill_worker() -> str:
    workers = [child for child in multiprocessing.active_children() if child.pid]
    if not workers:
        raise ValueError("it has no DataLoader worker")
    os.kill(workers[0].pid or 0, signal.SIGKILL)
    return f"pid {workers[0].pid}"


def spoil(session: Rank, armed: Armed, phase: str, op: str, inputs: Any) -> bool:
    """If these are gradients about to be reduced, make one element NaN, or flip a bit, and report it.

    armed    of kind "nan", "flip-gradient" or "flip-batch"; the last one takes what a module is called with
    phase    for the report
    op       the backend's method; "" for a module
    inputs   its argument that holds this rank's input tensors: a tensor, or nested lists of tensors; changed in place
    returns  whether they were; False also if the tensors cannot be written (as on another device than the CPU)
    """
    from ttprun.chaos import broken
    from ttprun.groups.process_group import groups_of

    detail = ""
    with contextlib.suppress(Exception):
        if armed.fault.kind == "nan":
            detail = broken.put_nan(op, inputs, [group.buckets for group in groups_of(session)])
        else:
            detail = broken.flip_in(op, inputs, armed.fault.seed or 0)
    if detail:
        report(session.channel, armed, phase, session.applied, detail)
    return bool(detail)
