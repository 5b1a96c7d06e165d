"""Open boundaries: after them the script may still call backward on what it has computed before them.

A GAN's discriminator learns from `fake.detach()`, and after its step the generator from `fake` itself: at the boundary
between the two steps, the graph of `fake` is needed, and is in no record. No run can resume there, nor from a snapshot
or checkpoint of it; after the generator's step it can. So snapshots are postponed to the next boundary
(`shares.py`), and a job that is to end continues up to it (`ttprun.agent.lead.schedules`).

The same holds between the steps of two optimizers that use the gradients of one backward (`look`), and for a step that
a hook takes inside a backward pass: the rest of the pass needs what the forward pass has computed with the weights
before the step. A replay refuses such a boundary.

Whether another one is open is predicted from the existing graphs (`values/autograd_graphs.py`) and gradients: if that
is wrong, a resume is refused (`values/autograd_graphs.py`, `gradients.py`), or a snapshot is taken a few steps late.
"""

from __future__ import annotations

import time
import weakref
from typing import NamedTuple

import torch

from ttprun.introspect.current_rank import Rank
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.ownership import waits_for_recovery
from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.tensors.gradients import of_optimizer
from ttprun.tensors.optimizer_registry import optimizers, parameters_of

MOST_PUT_OFF = 8  # boundaries: a script may keep a graph all the time
_HOLD_LIMIT_S = 5.0  # the agent looks several times per second
_LOOK_AGAIN_S = 0.05
# Those that have stepped inside a backward pass since the newest step outside.
_in_backward: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def is_in_backward() -> bool:
    """Whether the calling thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def why_none_is_closed(optimizer: torch.optim.Optimizer) -> Reason:
    """Called before each step: why no boundary is one from which a run could go on; "" if some are.

    optimizer   about to step
    """
    if not is_in_backward():
        _in_backward.clear()
    elif optimizer in _in_backward:
        return Reason(
            "step-in-backward",
            "its optimizers step inside the backward pass, and a replacement could not compute the rest of the pass: "
            "call step() after backward()",
        )
    else:
        _in_backward.add(optimizer)
    return Reason()


def forget() -> None:
    """The run of the script is over."""
    _in_backward.clear()


@waits_for_recovery
def come_to(session: Rank, boundary: int) -> None:
    """Called by the first rank before it announces an open boundary: note it on the board.

    If the agent waits for a boundary that is not open, and the newest one is, this rank stays there: it waits for the
    freeze, for _HOLD_LIMIT_S at most, and then until the freeze is over. The others cannot step before this rank has
    announced the next boundary.
    """
    if session.local_rank != LEADER:
        return
    give_up_at_s = time.monotonic() + _HOLD_LIMIT_S
    with session.changed:
        while _is_to_stand(session) and (session.is_holding or time.monotonic() < give_up_at_s):
            session.touch(Phase.COMMITTING)
            session.changed.wait(_LOOK_AGAIN_S)
    session.board.set(LEADER, Field.OPEN_AT, boundary)


def _is_to_stand(session: Rank) -> bool:
    is_asked = session.board.get(LEADER, Field.QUIESCE_ASKED) != 0 and not session.unprotected
    return is_asked and 0 < session.applied != session.board.get(LEADER, Field.OPEN_AT)


# Optimizers that use the gradients of one backward: which boundaries lie between their steps.
#
# With Muon for the matrices and AdamW for the rest, both step after each backward. At the boundary between the two
# steps the gradients of the second are needed, and are in no record, nor in a snapshot: no run can resume there. So
# it counts as open (`open_boundaries.py`).
#
# A GAN's discriminator has new gradients at its generator's step, too, but zeroes them before it steps. So what counts
# is what an optimizer did at its newest step: whether it used a gradient that had been there at another optimizer's
# step, with no backward in between. Before its first step, new gradients count. One gradient of each optimizer is
# looked at, and none of one that lets more steps pass than a snapshot is postponed for.


class _Mark(NamedTuple):
    """One gradient as it was: it is the same as long as no other takes its place, and as it was if nothing writes."""

    gradient: weakref.ref[torch.Tensor]
    version: int


class _Seen:
    """What was seen of an optimizer.

    used     its gradient after its newest step
    awaited  its gradient at the newest step of another optimizer, if it was new and no backward has begun since
    shares   whether its newest step used the latter; None: it has not stepped yet
    passed   steps of other optimizers since its newest one
    """

    def __init__(self) -> None:
        self.passed = 0
        self.used: _Mark | None = None
        self.awaited: _Mark | None = None
        self.shares: bool | None = None

    def note_backward(self) -> None:
        """A backward begins: what it leaves is of it, or was zeroed before."""
        self.awaited = None

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has taken its step, which may have written to its gradients."""
        self.used, self.awaited, self.passed = _mark(optimizer), None, 0


def look(optimizer: torch.optim.Optimizer) -> bool:
    """Called before each step: whether another optimizer is to use gradients that exist already.

    optimizer   about to step
    """
    living = optimizers()
    if len(living) < 2:
        return False
    is_awaited = False
    for candidate in living:
        row, now = of_optimizer(candidate), _mark(candidate)
        seen: _Seen = row.shared or _Seen()
        row.shared = seen
        if candidate is optimizer:  # what unscales or clips its gradients has written to them
            seen.shares = now is not None and seen.awaited is not None and now.gradient() is seen.awaited.gradient()
        else:
            seen.passed += 1
            seen.awaited = None if _are_same(now, seen.used) else now
            may_step_soon = seen.shares is not False and seen.passed <= MOST_PUT_OFF
            is_awaited = is_awaited or (may_step_soon and seen.awaited is not None)
    return is_awaited


def _mark(optimizer: torch.optim.Optimizer) -> _Mark | None:
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None:
            return _Mark(weakref.ref(gradient), local_of(gradient)._version)
    return None


def _are_same(now: _Mark | None, before: _Mark | None) -> bool:
    if now is None or before is None:
        return now is before
    return now.gradient() is before.gradient() and now.version == before.version
