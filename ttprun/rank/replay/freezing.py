"""Freeze: a rank is lost, and this one stops before its next commit, breaks the connections, and reports its boundary.

What is done, in which order and why: STAGES. Begin with `freeze`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ttprun.groups import apart, generations, on_device
from ttprun.groups.generations import LOOK_AGAIN_S
from ttprun.groups.journal import Journal
from ttprun.introspect import moments
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.patience import Patience
from ttprun.rank.session import Session
from ttprun.rank.step.stages import Stage
from ttprun.tensors import replicated

COLLECTIVE_STEP_S = 5.0  # within which a collective step ends, if no rank is lost


def freeze(session: Session, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """Stop, and report where this rank is.

    check_overtaken   called now and then; its exception ends the order
    """
    state = _Freeze(session, order, check_overtaken)
    for _, act, _ in STAGES:
        act(state)


class _Freeze(NamedTuple):
    """What the stages know; see `freeze`."""

    session: Session
    order: to_rank.Freeze
    check_overtaken: Callable[[], None]


def _hold(freeze: _Freeze) -> None:
    moments.reached("freeze")
    session = freeze.session
    session.hold(freeze.order.generation)


def _end_collective_step(freeze: _Freeze) -> None:
    if freeze.session.has_collective_steps and not freeze.order.lost:
        let_collective_step_end(*freeze)


def _freeze_journal(freeze: _Freeze) -> None:
    generations.freeze(freeze.session)


def _break_connections(freeze: _Freeze) -> None:
    generations.break_connections(freeze.session, freeze.check_overtaken)


def _end_step(freeze: _Freeze) -> None:
    let_step_end(freeze.session, freeze.check_overtaken)


def _settle(freeze: _Freeze) -> None:
    settle(*freeze)


def _give_up_saves(freeze: _Freeze) -> None:
    apart.give_up_older(freeze.session)


def _settle_device(_: _Freeze) -> None:
    on_device.settle()


def _report(freeze: _Freeze) -> None:
    session = freeze.session
    frozen = from_rank.RankFrozen(
        session.generation,
        session.applied,
        digest=replicated.digest() if session.applied and not session.has_collective_steps else "",
        has_group=bool(session.made.living or session.made.left),
        journal=generations.known(session),
    )
    session.channel.send(frozen)


STAGES: tuple[Stage[_Freeze], ...] = (
    Stage("hold", _hold, "first: the main thread must not commit any more, and what follows announces this generation"),
    Stage(
        "collective step",
        _end_collective_step,
        "before the journal is frozen: if no rank is lost, the step can end, but only as long as operations are issued",
    ),
    Stage("journal", _freeze_journal, "before the connections break: an operation would be issued on a broken one"),
    Stage(
        "connections",
        _break_connections,
        "before the wait for the step: what it waits for may be a collective that a lost rank never joins",
    ),
    Stage("step", _end_step, "before it settles: that announces where this rank is, to those that settle with it"),
    Stage("settle", _settle, "before the report and all that depends on the boundary: it may let one more step begin"),
    Stage(
        "saves", _give_up_saves, "after it has settled: those are given up that began before the boundary it came to"
    ),
    Stage(
        "device", _settle_device, "after it has settled: the step that this has let begin gives the device work, too"
    ),
    Stage("report", _report, "last: the digest is of weights that nothing changes any more"),
)


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
    while min(board.get(row, Field.STEPPED) for row in order.ranks) < session.applied and not patience.look():
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
    for row in order.ranks:
        while (generation := board.get(row, Field.HELD)) < session.generation:
            board.wait_for_change(row, Field.HELD, generation, LOOK_AGAIN_S)
            check_overtaken()
    boundary = max(order.committed, *(board.get(row, Field.APPLIED) for row in order.ranks))
    session.settle(boundary)
    with session.changed:
        while session.applied < boundary or session.is_applying:
            session.changed.wait(LOOK_AGAIN_S)
            check_overtaken()
