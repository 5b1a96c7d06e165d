"""Freeze: a rank is lost, and this one stops before its next commit, breaks the connections, and reports its boundary.

Begin with `freeze`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ttprun.groups import apart, generations, on_device
from ttprun.groups.generations import LOOK_AGAIN_S
from ttprun.groups.journal import Journal
from ttprun.introspect import moments
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.patience import Patience
from ttprun.rank.session import Session
from ttprun.tensors import replicated

COLLECTIVE_STEP_S = 5.0  # within which a collective step ends, if no rank is lost


def freeze(session: Session, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """Stop, and report where this rank is.

    check_overtaken   called now and then; its exception ends the order
    """
    moments.reached("freeze")
    with session.changed:
        session.generation = order.generation
        session.is_holding = True
        session.settle_at = 0
        session.changed.notify_all()
    if session.has_collective_steps and not order.lost:
        let_collective_step_end(session, order, check_overtaken)
    generations.freeze(session)
    generations.break_connections(session, check_overtaken)
    let_step_end(session, check_overtaken)
    settle(session, order, check_overtaken)
    apart.give_up_older(session)
    on_device.settle()
    frozen = from_rank.Frozen(
        session.generation,
        session.applied,
        digest=replicated.digest() if session.applied and not session.has_collective_steps else "",
        has_group=bool(session.made.living or session.made.left),
        journal=generations.known(session),
    )
    session.channel.send(frozen)


def let_step_end(session: Session, check_overtaken: Callable[[], None]) -> None:
    """Wait for the end of the running optimizer step, if there is one.

    check_overtaken   called while this waits; its exception ends the wait
    """
    with session.changed:
        while session.is_applying:
            session.changed.wait(LOOK_AGAIN_S)
            check_overtaken()


def let_collective_step_end(session: Session, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """No rank is lost: let all ranks end the step in which they communicate, as its middle cannot be saved.

    order             names the survivors, and the boundary that all have recorded
    check_overtaken   called while this waits; its exception ends the wait

    Blocks for COLLECTIVE_STEP_S at most, and no longer once a collective has failed.
    """
    settle(session, order, check_overtaken)
    board, patience = session.board, Patience(COLLECTIVE_STEP_S)
    session.share_row()
    while min(board.get(row, Field.STEPPED) for row in order.survivors) < session.applied and not patience.look():
        if any(entry.error is not None for entry in session[Journal].unfinished()):
            return
        time.sleep(LOOK_AGAIN_S)
        session.share_row()
        check_overtaken()


def settle(session: Session, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """Bring all survivors to one boundary.

    order             names the survivors, and the boundary that all have recorded
    check_overtaken   called while this waits; its exception ends the wait

    Each has stopped before its next commit. If one of them has stepped already, every rank had recorded that boundary,
    so those that wait before it may step too. The lost rank may be the one that has stepped: if the survivors stayed
    where they are, it would have to take that step again, without the gradients of a step of several optimizers, which
    are in no record.

    Blocks until this rank is at that boundary, or `check_overtaken` raises.
    """
    board = session.board
    board.announce(session.rank, Field.HELD, session.generation)
    session.share_row()
    for row in order.survivors:
        while (held := board.get(row, Field.HELD)) < session.generation:
            board.wait_for_change(row, Field.HELD, held, LOOK_AGAIN_S)
            check_overtaken()
    boundary = max(order.committed, *(board.get(row, Field.APPLIED) for row in order.survivors))
    with session.changed:
        session.settle_at = boundary
        session.changed.notify_all()
        while session.applied < boundary or session.is_applying:
            session.changed.wait(LOOK_AGAIN_S)
            check_overtaken()
