"""Survivors of a fault come to one boundary: the newest that a rank may have passed, the lost one included."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.rank.fakes import FakeChannel, make_session
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason
from ttprun.rank.replay import recovery_orders
from ttprun.rank.step.commit_barrier import commit

LIMIT_S = 60.0
LOST, SURVIVOR = 0, 1


@pytest.fixture
def session() -> Iterator[Rank]:
    made = make_session(rank=SURVIVOR, local_rank=SURVIVOR, has_stepped=True)
    yield made
    made.channel.close()


def frozen_at(session: Rank, order: to_rank.Freeze) -> int:
    """The boundary that a survivor reports, whose main thread comes to the commit of boundary 1 only then."""
    session.board.announce(SURVIVOR, Field.RECORDED, 1)
    freezing = threading.Thread(target=recovery_orders.freeze, args=(session, order, lambda: None), daemon=True)
    freezing.start()
    session.board.wait_for_change(SURVIVOR, Field.HELD, 0, LIMIT_S)

    def step() -> None:
        commit(session, 1)
        session.pass_boundary()

    main = threading.Thread(target=step, daemon=True)
    main.start()
    freezing.join(LIMIT_S)
    assert not freezing.is_alive()
    assert isinstance(session.channel, FakeChannel)
    (frozen,) = (sent for sent in session.channel.sent if isinstance(sent, from_rank.RankFrozen))
    session.unprotected = Reason(text="the test is over")
    main.join(LIMIT_S)
    assert not main.is_alive()
    return frozen.boundary


def test_a_survivor_takes_the_step_that_the_lost_rank_may_have_taken_before_it(session: Rank) -> None:
    session.board.announce(LOST, Field.RECORDED, 1)

    assert frozen_at(session, to_rank.Freeze((SURVIVOR,), 1, (LOST,), committed=1)) == 1


def test_a_survivor_waits_before_a_step_that_the_lost_rank_cannot_have_taken(session: Rank) -> None:
    assert frozen_at(session, to_rank.Freeze((SURVIVOR,), 1, (LOST,), committed=0)) == 0
