"""Cause the faults of `ttprun inject-fault` at their moments.

This module is the listener of `ttprun.introspect.stages` on runs that allow faults. A fault strikes once: it is
reported to the agent, which does not send it to the replacement. `damage.py` has the effects of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ttprun.chaos import broken, damage
from ttprun.chaos.damage import Armed
from ttprun.chaos.faults import RECOVERY_PHASES, Fault, parse_fault
from ttprun.introspect import stages
from ttprun.introspect.current_rank import Rank, current
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.channel import Channel, Message

waiting: list[Armed] = []  # for their moment, in this rank
_known: set[int] = set()
_C_CALLS_INTO_STEP = 12
# These need a collective's tensors, so they strike when one is about to be issued.
_AT_COLLECTIVES = ("skip-collective", "nan")
_inside_step: Armed | None = None


def begin(ordered: list[to_rank.InjectedFault], channel: Channel) -> None:
    """Watch all moments, and arm the faults that the agent has ordered so far."""
    _watch_modules()
    for order in ordered:
        _take_order(order, channel)


def _take_order(order: to_rank.InjectedFault, channel: Channel) -> None:
    try:
        arm(order.number, parse_fault(order.fault))
    except ValueError as error:
        channel.send(from_rank.FaultFailed(order.number, str(error)))


def taken_from(take: Callable[[Message], None], channel: Channel) -> Callable[[Message], None]:
    """A handler of the agent's messages: those about faults are handled here, the others by `take`."""

    def handle(message: Message) -> None:
        match message:
            case to_rank.InjectedFault():
                _take_order(message, channel)
            case to_rank.FaultDone():
                damage.done_by_agent()
            case _:
                take(message)

    return handle


def arm(number: int, fault: Fault) -> None:
    """A fault waits for its moment from now on; the agent may order it twice."""
    if number not in _known:
        _known.add(number)
        waiting.append(Armed(number, fault))


def reached(phase: str) -> None:
    """The main thread (or autograd's, or the recovery's) has reached a moment that a fault may wait for."""
    if waiting:
        _strike_if_due(phase)


def _strike_if_due(phase: str) -> None:
    session = current()
    if session is None:
        return
    for armed in _due(session, phase):
        if armed.fault.kind in _AT_COLLECTIVES or not _take(armed):
            continue
        if phase == "in_step":
            _strike_inside_step(session, armed)
        else:
            damage.strike(session, armed, phase)
        return


def _due(session: Rank, phase: str) -> Iterator[Armed]:
    """The faults that are due. One whose step is over strikes at the next such moment."""
    is_recovery = phase in RECOVERY_PHASES
    if not (session.mode.is_live or is_recovery):
        return
    step = damage.step_of(session, phase)
    if is_recovery and not session.mode.is_live:
        step = session.mode.boundary
    for armed in list(waiting):
        fault = armed.fault
        if (fault.step is None or fault.step <= step) and (
            fault.phase == phase or (not fault.phase and not is_recovery)
        ):
            yield armed


def _take(armed: Armed) -> bool:
    """Disarm a fault that is about to strike; False if another thread has done so."""
    try:
        waiting.remove(armed)
    except ValueError:
        return False
    return True


def _strike_inside_step(session: Rank, armed: Armed) -> None:
    """Strike at a later one of the optimizer's calls of C functions, after it has changed some of its tensors."""
    global _inside_step
    _inside_step = armed
    calls_left = _C_CALLS_INTO_STEP

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls_left
        if event == "c_call":
            calls_left -= 1
            if calls_left == 0:
                _strike_inside_step_now(session)

    sys.setprofile(count)


def _strike_inside_step_now(session: Rank) -> None:
    global _inside_step
    sys.setprofile(None)
    armed, _inside_step = _inside_step, None
    if armed is not None:
        damage.strike(session, armed, "in_step")


def reached_step_end() -> None:
    """Optimizer.step is over: a fault that has found too few calls inside strikes now."""
    session = current()
    if _inside_step is not None and session is not None:
        _strike_inside_step_now(session)


def reached_collective(op: str, inputs: Any) -> bool:
    """A collective is about to be issued, by which backward passes, setup, and waits for a checkpoint are recognized.

    op       the backend's method
    inputs   the argument that holds this rank's input tensors
    returns  whether this rank is to skip it
    """
    session = current()
    if not waiting or session is None:
        return False
    phase = phase_of_collective(session, op)
    for armed in (*_due(session, phase), *_due(session, "collective")):
        if armed.fault.kind == "nan" and damage.put_nan(session, armed, phase, op, inputs):
            _take(armed)
            break
        if armed.fault.kind == "skip-collective" and _take(armed):
            damage.strike(session, armed, phase)
            return True
    if phase != "collective":
        reached(phase)
    return False


def phase_of_collective(session: Rank, op: str) -> str:
    """Which phase a collective shows; "collective" if none but itself."""
    import torch

    if torch._C._current_graph_task_id() != -1:  # autograd is running
        return "backward"
    if session.applied == 0:
        return "setup"
    return "checkpoint" if op == "barrier" else "collective"


connected = broken.publish


def _watch_modules() -> None:
    """Report forward and backward passes as moments."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    from ttprun.capture.installing import unless_traced

    def before_forward(module: Any, args: Any) -> None:
        stages.reached("forward" if module.training else "validation")

    register_module_forward_pre_hook(unless_traced(before_forward))
    backward = torch.autograd.backward

    def then_reached(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        stages.reached("backward")  # for faults that no collective inside has triggered

    torch.autograd.backward = then_reached
