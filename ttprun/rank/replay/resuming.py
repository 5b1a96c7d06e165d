"""Resume: connect in the new generation, issue the journal again, and let the main thread continue.

Begin with `resume`, for a survivor; a replacement whose replay has ended goes live (`go_live`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttprun.groups.entry import Entry
from ttprun.groups.host import Group
from ttprun.groups.journal import Journal, has_ended
from ttprun.groups.process_group import groups_of
from ttprun.groups.reissue import issue_again
from ttprun.introspect import moments
from ttprun.protocol import from_rank, to_rank
from ttprun.rank.checks.alignment import Alignment
from ttprun.rank.checks.proof import Proof
from ttprun.rank.checks.replay_guard import Expected
from ttprun.rank.checks.verification import Verifier
from ttprun.rank.replay.freezing import LOOK_AGAIN_S, all_groups
from ttprun.rank.replay.replay import ReplayRun
from ttprun.rank.session import Session


def resume(
    session: Session, order: to_rank.Resume, again: list[tuple[Entry, Any]], check_overtaken: Callable[[], None]
) -> None:
    """Issue the journal again, thaw, and wait until all of it has completed.

    again             empty; gets each entry with its new work, for a recovery that interrupts this one
    check_overtaken   called now and then; its exception ends the order
    """
    note_agreed(session, order)
    is_connected = False
    # A replacement connects these before it issues anything, and a backend may connect within an operation.
    for group in all_groups(session):
        if group.links.is_joined and group.number <= session.made.at_boundary:
            group.links.connect_in(session.generation)
    while True:
        with session[Journal].lock:
            entries, at = session[Journal].entries, len(again)
            entry = entries[at] if at < len(entries) else None
            if entry is None and is_connected:
                session[Journal].is_frozen = False
                session[Journal].changed.notify_all()
                break
        if entry is None:
            _connect_up_to(session, None)
            session.channel.send(from_rank.Rebuilt(session.generation))
            is_connected = True
            continue
        if not entry.group.links.are_of(session.generation):
            _connect_up_to(session, entry.group)
        inner = issue_again(session, entry)
        again.append((entry, inner))
        moments.reached("reissue")
        if not entry.is_done:
            session[Journal].attach(entry, inner)
            if entry.future is not None:
                entry.group.bridge(entry, inner)
    session[Verifier].prove_from(session.applied)
    with session.changed:
        session.is_holding = False
        session.changed.notify_all()
    moments.reached("thaw")
    for entry, inner in again:
        while not has_ended(inner, LOOK_AGAIN_S):
            check_overtaken()
        inner.wait()
        entry.group.complete(entry, inner)
    check_overtaken()
    session.channel.send(from_rank.Reissued(session.generation))


def _connect_up_to(session: Session, newest: Group | None) -> None:
    """Connect the groups made before this one, and this one; None: all.

    Not before the journal needs them: a replacement that runs from the top makes a group only after it has issued the
    operations before that. A group that was never connected is left to the main thread.
    """
    for group in all_groups(session):
        if group.links.is_joined and (newest is None or group.number <= newest.number):
            group.links.connect_in(session.generation)


def go_live(session: Session, replay: ReplayRun, order: to_rank.Resume) -> None:
    """The replay has ended, and the tensors are loaded: connect, and let the main thread continue.

    replay   of this rank, whose main thread waits at the boundary
    order    of the agent, for this generation
    """
    for group in groups_of(session):
        group.links.connect_in(session.generation)
        group.links.is_joined = True
    session.channel.send(from_rank.Rebuilt(session.generation))
    note_agreed(session, order)
    session[Verifier].prove_from(replay.boundary)
    if replay.is_alone:
        session.proof = Proof.of(session, replay.boundary, is_of_all=not replay.is_joining)
    # Ranks that have all gone back have no journal of others to keep to, only what they have left themselves; and a
    # rank that was lost had perhaps gone further than the others.
    session.expected = Expected(session.channel, session.generation, order.expected, session.proof is None)
    replay.live.set()


def note_agreed(session: Session, order: to_rank.Resume) -> None:
    """What all ranks know alike of the operations since the boundary."""
    session[Journal].note_agreed(givers_of(order), order.received, order.settled)
    session[Alignment].begin(session, order.generation, order.takes_from)


def givers_of(order: to_rank.Resume) -> dict[tuple[str, int], int]:
    """The ranks that broadcast results, by the agent's order: see Journal.sources."""
    return {(name, number): rank for name, number, rank in order.sources}
