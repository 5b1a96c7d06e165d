"""Carry out the faults that `ttprun inject-fault` asks for, at the moment that they name.

The hooks call `reached(phase)`; with no fault armed that is one comparison. A fault strikes once: the agent is told
before it strikes, and does not hand it to the replacement.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from ttprun.faults import Fault
from ttprun.rank.session import current

_armed: list[Fault] = []
EXIT_CODE = 1
_C_CALLS_INTO_STEP = 12


class InjectedFaultError(RuntimeError):
    """The exception that `inject-fault exception` raises in the script."""


def arm(fault: Fault) -> None:
    """A fault waits for its moment from now on."""
    _armed.append(fault)


def reached(phase: str) -> None:
    """The main thread (or autograd's) has come to a moment that a fault may wait for."""
    if _armed:
        _strike_if_due(phase)


def _strike_if_due(phase: str) -> None:
    session = current()
    if session is None:
        return
    if session.replay is not None and phase not in ("start", "replay", "transfer"):
        return
    step = session.applied - 1 if phase == "after_step" else session.applied
    for fault in _armed:
        is_due = fault.step is None or fault.step == step or phase in ("replay", "transfer")
        if is_due and fault.phase in (None, phase):
            _armed.remove(fault)
            if phase == "in_step":
                _strike_inside_step(fault)
            else:
                _strike(fault, phase)
            return


def _strike(fault: Fault, phase: str) -> None:
    session = current()
    if session is not None:
        session.channel.send({"op": "fault_struck", "fault": str(fault), "phase": phase, "step": session.applied})
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exit":
        os._exit(EXIT_CODE)
    elif fault.kind == "exception":
        raise InjectedFaultError(f"injected by ttprun in phase {phase}")


def _strike_inside_step(fault: Fault) -> None:
    """Let the optimizer change some of its tensors first: strike at one of the C functions that it calls."""
    left = _C_CALLS_INTO_STEP

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event == "c_call":
            left -= 1
            if left == 0:
                sys.setprofile(None)
                _strike(fault, "in_step")

    sys.setprofile(count)


def reached_collective(op: str) -> None:
    """A collective is about to be issued: that tells backward passes, set-up, and waiting for a checkpoint."""
    session = current()
    if not _armed or session is None:
        return
    import torch

    if torch._C._current_graph_task_id() != -1:  # autograd is at work
        reached("backward")
    elif session.applied == 0:
        reached("setup")
    elif op == "barrier":
        reached("checkpoint")


def watch_modules() -> None:
    """Make forward and backward passes moments that a fault can wait for; only on runs that allow faults."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def before_forward(module: Any, args: Any) -> None:
        reached("forward" if module.training else "validation")

    register_module_forward_pre_hook(before_forward)
    backward = torch.autograd.backward

    def then_reached(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        reached("backward")  # only if no collective in it was the moment

    torch.autograd.backward = then_reached


def reached_step_end() -> None:
    """Optimizer.step is over: a fault that was to strike inside found too few calls, and does not strike."""
    if sys.getprofile() is not None and getattr(sys.getprofile(), "__module__", "") == __name__:
        sys.setprofile(None)
