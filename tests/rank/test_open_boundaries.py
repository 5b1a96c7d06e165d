"""Open boundaries: which are, and that the first rank does not go past another one while the agent waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.rank.fakes import make_session
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason
from ttprun.tensors import open_boundaries
from ttprun.tensors.open_boundaries import come_to, why_none_is_closed

LIMIT_S = 60.0


AtBoundary = Callable[..., Rank]


@pytest.fixture
def at_boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[AtBoundary]:
    """`at_boundary(applied, open_at, is_asked, ...)`: a rank that has passed a boundary.

    open_at   the newest open one
    is_asked  the agent waits for one that is not
    """
    monkeypatch.setattr(open_boundaries, "_HOLD_LIMIT_S", LIMIT_S)
    made: list[Rank] = []

    def make(applied: int, open_at: int, is_asked: bool, **known: Any) -> Rank:
        made.append(make_session(applied=applied, **known))
        made[-1].board.set(0, Field.OPEN_AT, open_at)
        made[-1].board.set(0, Field.QUIESCE_ASKED, int(is_asked))
        return made[-1]

    yield make
    for session in made:
        session.channel.close()


@pytest.mark.parametrize(
    "stands",
    [
        {"applied": 10, "open_at": 9, "is_asked": False},
        {"applied": 10, "open_at": 10, "is_asked": True},
        {"applied": 10, "open_at": 9, "is_asked": True, "local_rank": 1},
        {"applied": 0, "open_at": 0, "is_asked": True},
    ],
    ids=["nobody waits", "it stands at an open one", "it is not the first", "no step yet"],
)
def test_a_rank_goes_on_where_it_has_no_reason_to_wait(
    at_boundary: AtBoundary, stands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = at_boundary(**stands)
    monkeypatch.setattr(session.changed, "wait", lambda limit_s: pytest.fail("it waits"))

    come_to(session, 11)


def test_an_open_boundary_is_noted_by_the_first_rank_alone(at_boundary: AtBoundary) -> None:
    first = at_boundary(10, open_at=0, is_asked=False)
    second = at_boundary(10, open_at=0, is_asked=False, board=first.board, local_rank=1)

    come_to(second, 11)
    not_noted = first.board.get(0, Field.OPEN_AT)
    come_to(first, 11)

    assert (not_noted, first.board.get(0, Field.OPEN_AT)) == (0, 11)


def test_a_rank_waits_before_an_open_boundary_until_it_is_not_wanted_any_more(at_boundary: AtBoundary) -> None:
    session = at_boundary(10, open_at=9, is_asked=True)
    waits = threading.Thread(target=come_to, args=(session, 11))

    waits.start()
    waits.join(0.2)
    waited = waits.is_alive()
    _tell(session, is_asked=False, is_holding=False)
    waits.join(LIMIT_S)

    assert waited
    assert not waits.is_alive()


def test_a_frozen_rank_waits_for_the_end_of_the_freeze_or_the_others_step_without_having_heard_of_it(
    at_boundary: AtBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_boundaries, "_HOLD_LIMIT_S", 0.1)
    session = at_boundary(10, open_at=9, is_asked=True)
    waits = threading.Thread(target=come_to, args=(session, 11))

    _tell(session, is_asked=True, is_holding=True)
    waits.start()
    waits.join(0.5)
    waited = waits.is_alive()
    _tell(session, is_asked=False, is_holding=False)
    waits.join(LIMIT_S)

    assert waited
    assert not waits.is_alive()


def _tell(session: Rank, is_asked: bool, is_holding: bool) -> None:
    with session.changed:
        session.is_holding = is_holding
        session.board.set(0, Field.QUIESCE_ASKED, int(is_asked))
        session.changed.notify_all()


def test_an_agent_that_never_comes_holds_nobody_up_for_long(
    at_boundary: AtBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_boundaries, "_HOLD_LIMIT_S", 0.1)
    session = at_boundary(10, open_at=9, is_asked=True)

    come_to(session, 11)

    assert session.board.get(0, Field.OPEN_AT) == 11


def test_optimizers_are_known_to_step_inside_backward_passes_alone_from_their_second_turn_on() -> None:
    found: list[Reason] = []
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in weights}
    for one in weights:
        one.register_post_accumulate_grad_hook(lambda one: found.append(why_none_is_closed(optimizers[one])))

    def iterate() -> list[bool]:
        found.clear()
        torch.stack(weights).sum().backward()  # type: ignore[no-untyped-call]
        return ["inside the backward pass" in why.text for why in found]

    assert [iterate(), iterate()] == [[False, False], [True, True]]
    assert not why_none_is_closed(optimizers[weights[0]])  # a step outside
    assert [iterate(), iterate()] == [[False, False], [True, True]]
    open_boundaries.forget()
    assert iterate() == [False, False]
    open_boundaries.forget()
