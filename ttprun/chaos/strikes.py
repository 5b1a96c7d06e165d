"""Cause the faults of `ttprun inject-fault` at their moments.

This module is the listener of `ttprun.introspect.stages` on runs that allow faults. A fault strikes once, a sticky one
in each later step, too; it is reported to the agent, which does not send it to the replacement. `damage.py` has the
effects of each kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ttprun.capture.installing import unless_traced
from ttprun.capture.records.recorder import Recorder
from ttprun.chaos import broken, damage, step_digests
from ttprun.chaos.damage import Armed, step_of
from ttprun.chaos.injected_faults import RECOVERY_PHASES, Fault, parse_fault
from ttprun.chaos.plain_observer.sitecustomize import leave, seed_what_the_system_seeds
from ttprun.chaos.step_digests import append, live
from ttprun.introspect import stages
from ttprun.introspect.current_rank import Rank, current
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.channel import Channel, Message

waiting: list[Armed] = []  # for their moment, in this rank
_known: set[int] = set()
_C_CALLS_INTO_STEP = 12
# These need the tensors of a collective, or of a module's call: they strike when that is about to be issued, or made.
_AT_COLLECTIVES = ("skip-collective", "nan", "flip-gradient", "flip-batch")
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
    if armed.fault.sticky and (session := current()) is not None:
        waiting.append(replace(armed, fault=replace(armed.fault, step=session.applied + 1)))
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
        if armed.fault.kind in ("nan", "flip-gradient") and damage.spoil(session, armed, phase, op, inputs):
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
    if torch._C._current_graph_task_id() != -1:  # autograd is running
        return "backward"
    return "setup" if session.applied == 0 else "checkpoint" if op == "barrier" else "collective"


connected = broken.publish


def _watch_modules() -> None:
    """Report forward and backward passes as moments."""

    def before_forward(module: Any, args: Any) -> None:
        if waiting and module.training and (session := current()) is not None:
            for armed in _due(session, "forward"):
                if armed.fault.kind == "flip-batch" and damage.spoil(session, armed, "forward", "", list(args)):
                    _take(armed)
        stages.reached("forward" if module.training else "validation")

    register_module_forward_pre_hook(unless_traced(before_forward))
    backward = torch.autograd.backward

    def then_reached(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        stages.reached("backward")  # for faults that no collective inside has triggered

    torch.autograd.backward = then_reached


# What `ttprun check` sees from inside a rank, beside its trace: the moments that it comes to.
#
# It hears of moments in the place of this module, and passes them on. Each thing is a line of JSON in a file of the
# rank's, in one write, so that a killed process leaves whole lines, and the one that takes its place adds to them.
# After the last step that is wanted, the rank keeps its newest record there and leaves. Begin with `Observer.reached`.


_OBSERVED = "_TTPRUN_CHECK"


def order_observer(folder: Path, steps: int) -> dict[str, str]:
    """The environment of a launch whose ranks are to be observed for so many steps; `folder` gets their notes."""
    return {_OBSERVED: f"{steps}:{folder}"}


def observer_for(rank: int) -> Observer | None:
    """The observer that the environment asks for, None if it asks for none."""
    steps, _, folder = os.environ.get(_OBSERVED, "").partition(":")
    if not folder:
        return None
    seed_what_the_system_seeds(rank)
    return Observer(Path(folder), int(steps), rank)


class Observer:
    """The listener of a rank that is checked.

    folder   gets rank<N>.jsonl, and rank<N>.head and rank<N>.blobs, the last record
    steps    optimizer steps after which the rank leaves
    """

    reached_step_end = staticmethod(reached_step_end)
    connected = staticmethod(connected)

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        self._folder, self._steps, self._rank = folder, steps, rank
        self._seen: set[tuple[str, int]] = set()

    def reached(self, moment: str) -> None:
        """A thread has come to a moment."""
        session = live()
        if session is not None:
            self._note_moment(session, moment)
        reached(moment)
        if session is not None and moment == "after_step" and session.applied >= self._steps:
            self._leave(session)

    def reached_collective(self, op: str, inputs: Any) -> bool:
        """A collective is about to be issued; returns whether this rank is to leave it out."""
        session = live()
        if session is not None:
            self._note_moment(session, phase_of_collective(session, op))
        return reached_collective(op, inputs)

    def _note_moment(self, session: Rank, moment: str) -> None:
        """Each moment once a step."""
        step = step_of(session, moment)
        if (moment, step) not in self._seen:
            self._seen.add((moment, step))
            self._note({"moment": moment, "step": step})

    def _note(self, what: dict[str, Any]) -> None:
        """Never raises: what cannot be noted is missed by whoever compares."""
        append(self._folder / f"rank{self._rank}.jsonl", json.dumps(what) + "\n")

    def _leave(self, session: Rank) -> None:
        """Keep the newest record and the end of the trace, and end the process."""
        step_digests.end_run(session)
        record = session[Recorder].read(session.applied)
        for name, content in zip(("head", "blobs"), record or (), strict=False):
            with contextlib.suppress(OSError):
                (self._folder / f"rank{self._rank}.{name}").write_bytes(content)
        leave()
