"""Freeze: a rank is lost, and this one stops before its next commit, breaks the connections, and reports its boundary.

Begin with `freeze`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from ttprun.device.interface import DeviceFailedError
from ttprun.groups import apart, on_device
from ttprun.groups.entry import Entry
from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.links import cut_all
from ttprun.groups.operations import SAME_FOR_ALL
from ttprun.groups.process_group import ManagedGroup, living
from ttprun.introspect import moments
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.patience import Patience
from ttprun.rank.replay import stopping
from ttprun.rank.session import Session
from ttprun.rank.step.inter_node_commit import InterNodeCommit
from ttprun.tensors import replicated

LOOK_AGAIN_S = 0.05
LET_FINISH_S = 0.05  # time for operations between living ranks to end by themselves
COLLECTIVE_STEP_S = 5.0  # within which a collective step ends, if no rank is lost
LOCK_LIMIT_S = 1.0  # in which an operation is issued
STUCK_AFTER_S = 2.0  # after a cut; an operation that can end does so within milliseconds
Issued = Sequence[tuple[Entry, Any]]  # entries with the works of the backend, which another recovery has to end


def freeze(session: Session, order: to_rank.Freeze, issued_again: Issued, check_overtaken: Callable[[], None]) -> None:
    """Stop, and report where this rank is.

    issued_again      what an older recovery was issuing
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
    freeze_journal(session)
    break_connections(session, issued_again, check_overtaken)
    let_step_end(session, check_overtaken)
    settle(session, order, check_overtaken)
    apart.give_up_older(session)
    on_device.settle()
    frozen = from_rank.Frozen(
        session.generation,
        session.applied,
        digest=replicated.digest() if session.applied and not session.has_collective_steps else "",
        has_group=bool(session.made.living or session.made.left),
        journal=_signatures(session),
    )
    session.channel.send(frozen)


def freeze_journal(session: Session) -> None:
    """From now on no operation is issued but by the recovery.

    Raises DeviceFailedError if the main thread is stuck while it issues one: it holds the journal's lock then, and may
    wait for the device in C++, where the launch of a kernel waits for a stuck collective. An abort ends that.
    """
    journal = session[Journal]
    if not journal.lock.acquire(timeout=LOCK_LIMIT_S):
        cut_all(group.links for group in list(living))
        if not journal.lock.acquire(timeout=on_device.SETTLE_LIMIT_S):
            raise DeviceFailedError("the main thread is stuck in a call of the device, which the abort has not ended")
    journal.is_frozen = True
    journal.changed.notify_all()
    journal.lock.release()


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


def break_connections(
    session: Session, issued_again: Issued, check_overtaken: Callable[[], None] = lambda: None
) -> None:
    """Cut every connection, and wait until no operation of the old generation touches a tensor any more.

    issued_again      what an older recovery was issuing
    check_overtaken   called while this waits for the script; its exception ends the wait

    Operations between living ranks first get LET_FINISH_S: one that is cut with messages in flight may never end.
    """
    groups = all_groups(session)
    works = [(entry, entry.inner) for entry in session[Journal].entries if entry.inner is not None]
    works += issued_again
    end_s = time.monotonic() + LET_FINISH_S
    for _, inner in works:
        has_ended(inner, end_s - time.monotonic())
    stopping.end_stuck_tasks(session, [link for group in groups for link in group.links.all], check_overtaken)
    cut_all(group.links for group in groups)
    if (commit := session.get(InterNodeCommit)) is not None:
        commit.cut()
    on_device.settle()
    end_s = time.monotonic() + STUCK_AFTER_S
    for entry, inner in works:
        if not has_ended(inner, end_s - time.monotonic()):
            entry.group.links.abandon()
            continue
        with contextlib.suppress(Exception):
            inner.wait()
            entry.group.complete(entry, inner)
    for entry in session[Journal].unfinished():
        session[Journal].attach(entry, None)
    for group in groups:
        group.links.forget()


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


def all_groups(session: Session) -> list[ManagedGroup]:
    """All groups that exist, or did at the newest boundary, or that the journal needs, in the order of their making."""
    with session[Journal].lock:
        found = {entry.group for entry in session[Journal].entries}
    found |= {*session.made.living.values(), *session.made.left}
    return sorted((one for one in found if isinstance(one, ManagedGroup)), key=lambda group: group.number)


def _signatures(session: Session) -> dict[str, GroupJournal]:
    """By group and sequence: ranks, operations since the boundary, and what of them need not be issued again."""
    found: dict[str, GroupJournal] = {}
    with session[Journal].lock:
        for entry in session[Journal].entries:
            group = found.setdefault(entry.sequence, GroupJournal(list(entry.members), []))
            if entry.is_settled:
                group.settled.append(entry.number)
            if entry.digest and len(group.received) == len(group.issued):
                group.received.append(entry.digest)
            if entry.is_done and (entry.result is not None or (entry.held is not None and entry.held.is_kept)):
                group.results.append(len(group.issued))
            elif entry.is_done and entry.op in SAME_FOR_ALL:
                group.taken.append(len(group.issued))
            group.issued.append(entry.signature)
    return found
