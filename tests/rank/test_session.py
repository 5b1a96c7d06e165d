"""What a rank notes of itself on the board."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rank.fakes import make_session
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.board import OPERATION_NAMES, Field, Phase
from ttprun.protocol.reason import Reason

ALLREDUCE = OPERATION_NAMES.index("allreduce")


@pytest.fixture
def session() -> Iterator[Rank]:
    """Of the second of two ranks."""
    made = make_session(rank=1, local_rank=1)
    yield made
    made.channel.close()


def test_what_the_main_thread_does_is_noted_with_the_time_in_its_own_row(session: Rank) -> None:
    before_ns = time.monotonic_ns()

    session.touch(Phase.STEPPING)

    board = session.board
    assert [board.get(row, Field.PHASE) for row in range(2)] == [Phase.STARTING, Phase.STEPPING]
    assert before_ns <= board.get(1, Field.SEEN_NS) <= time.monotonic_ns()


def test_in_a_replay_it_is_replaying_whatever_it_does(session: Rank) -> None:
    replay: Any = SimpleNamespace(is_live=False)
    session.mode = replay

    session.touch(Phase.COMPUTING)

    assert session.board.get(1, Field.PHASE) == Phase.REPLAYING


def test_only_collectives_of_all_ranks_count_as_meetings(session: Rank) -> None:
    session.meet(ALLREDUCE, 2)
    session.meet(ALLREDUCE, 1)

    fields = (Field.COLLECTIVES, Field.MEETINGS, Field.OPERATION, Field.PHASE)
    assert [session.board.get(1, field) for field in fields] == [2, 1, ALLREDUCE, Phase.COLLECTIVE]


def test_protection_that_cannot_be_given_up_on_a_deep_stack_is_given_up_further_up(
    session: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def send(message: Any, fds: Any = ()) -> None:
        if not sent:
            sent.append(None)
            raise RecursionError
        sent.append(message)

    monkeypatch.setattr(session.channel, "send", send)

    with pytest.raises(RecursionError):
        session.give_up_protection(Reason(text="it is too deep"))
    session.give_up_protection(Reason(text="it was too deep"))

    assert session.unprotected.text == "it was too deep"
    assert [message.reason.text for message in sent[1:]] == ["it was too deep"]
