"""Open boundaries: after them the script may still call backward on what it has computed before them.

A GAN's discriminator learns from `fake.detach()`, and after its step the generator from `fake` itself: at the boundary
between the two steps, the graph of `fake` is needed, and is in no record. No run can resume there, nor from a snapshot
or checkpoint of it; after the generator's step it can. So snapshots are postponed to the next boundary
(`snapshots.py`), and a job that is to end continues up to it (`ttprun.agent.checkpoints.quiesce_schedule`).

The same holds between the steps of two optimizers that use the gradients of one backward (`shared_backwards.py`), and
for a step that a hook takes inside a backward pass: the rest of the pass needs what the forward pass has computed with
the weights before the step. A replay refuses such a boundary.

Whether another one is open is predicted from the existing graphs (`values/histories.py`) and gradients: if that is
wrong, a resume is refused (`values/unrecorded.py`, `gradients.py`), or a snapshot is taken a few steps late.
"""

from __future__ import annotations

import time
import weakref

import torch

from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.tensors.host import Host

MOST_PUT_OFF = 8  # boundaries: a script may keep a graph all the time
_HOLD_LIMIT_S = 5.0  # the agent looks several times per second
_LOOK_AGAIN_S = 0.05
# Those that have stepped inside a backward pass since the newest step outside.
_in_backward: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def is_in_backward() -> bool:
    """Whether the calling thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def why_none_is_closed(optimizer: torch.optim.Optimizer) -> str:
    """Called before each step: why no boundary is one from which a run could go on; "" if some are.

    optimizer   about to step
    """
    if not is_in_backward():
        _in_backward.clear()
    elif optimizer in _in_backward:
        return (
            "its optimizers step inside the backward pass, and a replacement could not compute the rest of the pass: "
            "call step() after backward()"
        )
    else:
        _in_backward.add(optimizer)
    return ""


def forget() -> None:
    """The run of the script is over."""
    _in_backward.clear()


def come_to(session: Host, boundary: int) -> None:
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


def _is_to_stand(session: Host) -> bool:
    is_asked = session.board.get(LEADER, Field.QUIESCE_ASKED) != 0 and not session.unprotected
    return is_asked and 0 < session.applied != session.board.get(LEADER, Field.OPEN_AT)
