"""Resume: connect in the new generation, issue the journal again, and let the main thread continue.

Begin with `resume`, for a survivor; a replacement whose replay has ended goes live (`go_live`).
"""

from __future__ import annotations

from collections.abc import Callable

from ttprun.groups import generations
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import groups_of
from ttprun.introspect import moments
from ttprun.protocol import from_rank, to_rank
from ttprun.rank.checks.alignment import Alignment
from ttprun.rank.checks.proof import Proof
from ttprun.rank.checks.replay_guard import Expected
from ttprun.rank.checks.verification import Verifier
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.session import Session


def resume(session: Session, order: to_rank.Resume, check_overtaken: Callable[[], None]) -> None:
    """Issue the journal again, thaw, and wait until all of it has completed.

    check_overtaken   called now and then; its exception ends the order
    """
    note_agreed(session, order)
    generations.issue_again(session, lambda: session.channel.send(from_rank.RankRebuilt(session.generation)))
    session[Verifier].prove_from(session.applied)
    session.go_on()
    moments.reached("thaw")
    generations.complete(session, check_overtaken)
    session.channel.send(from_rank.RankReissued(session.generation))


def go_live(session: Session, replay: ReplayRun, order: to_rank.Resume) -> None:
    """The replay has ended, and the tensors are loaded: connect, and let the main thread continue.

    replay   of this rank, whose main thread waits at the boundary
    order    of the agent, for this generation
    """
    for group in groups_of(session):
        group.links.connect_in(session.generation)
        group.links.is_joined = True
    session.channel.send(from_rank.RankRebuilt(session.generation))
    note_agreed(session, order)
    session[Verifier].prove_from(replay.boundary)
    if replay.is_alone:
        Proof.begin(session, replay.boundary, is_of_all=not replay.is_joining)
    # Ranks that have all gone back have no journal of others to keep to, only what they have left themselves; and a
    # rank that was lost had perhaps gone further than the others.
    expect(session, order)
    replay.live.set()


def expect(session: Session, order: to_rank.Resume) -> None:
    """This replacement must issue what the survivors have issued since the boundary."""
    session.expected = Expected(session.channel, session.generation, order.expected, session.proof is None)


def note_agreed(session: Session, order: to_rank.Resume) -> None:
    """What all ranks know alike of the operations since the boundary."""
    session[Journal].note_agreed(givers_of(order), order.received, order.settled)
    session[Alignment].begin(session, order.generation, order.takes_from)


def givers_of(order: to_rank.Resume) -> dict[tuple[str, int], int]:
    """The ranks that broadcast results, by the agent's order: see Journal.sources."""
    return {(name, number): rank for name, number, rank in order.sources}
