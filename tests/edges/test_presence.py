"""A rank that has not imported torch yet answers for itself when another is lost."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.options import OPTIONS
from tests.rank.fakes import make_session
from ttprun.protocol import channel, from_rank
from ttprun.protocol.board import Board, Field
from ttprun.protocol.channel import Channel
from ttprun.protocol.to_rank import Freeze, Replay, Resume, Welcome
from ttprun.rank.bootstrap.presence import Presence
from ttprun.rank.replay.order_thread import Recovery

LIMIT_S = 60.0


@pytest.fixture
def lines() -> Iterator[tuple[Channel, Presence, Board]]:
    ours, theirs = channel.pair()
    fd, board = Board.create(2)
    presence = Presence(theirs, Welcome(1, 1, 2, 2, 1, "/tmp", is_replacement=True, options=OPTIONS), [fd])
    presence.start()
    yield ours, presence, board
    ours.close()
    for thread in threading.enumerate():
        if thread.name == "ttprun-channel":
            thread.join(LIMIT_S)
    theirs.close()
    os.close(fd)


def resume(generation: int, **expected: list[str]) -> Resume:
    return Resume((), generation, boundary=0, expected=expected)


def up_to_frozen(line: Channel) -> list[channel.Message]:
    found = []
    for message in line.messages():
        found.append(message)
        if isinstance(message, from_rank.RankFrozen):
            break
    return found


def test_it_stops_at_boundary_0_at_once(lines: Any) -> None:
    ours, presence, board = lines

    ours.send(Freeze((1,), 2, lost=(0,)))

    assert next(ours.messages()) == from_rank.RankFrozen(2, boundary=0)
    assert presence.generation == 2
    assert [board.get(rank, Field.HELD) for rank in range(2)] == [0, 2]


def test_a_replacement_of_which_something_is_expected_says_so_itself_when_it_has_done_it(lines: Any) -> None:
    ours, presence, _ = lines

    ours.send(resume(2, world=["broadcast"]))
    ours.send(Freeze((1,), 3, lost=(0,)))

    said = up_to_frozen(ours)
    assert said == [from_rank.RankRebuilt(2), from_rank.RankFrozen(3, boundary=0)]
    assert presence.order == resume(2, world=["broadcast"])


@pytest.mark.parametrize("order", [resume(2), Replay(0, 2, boundary=5, source=1)])
def test_a_replacement_may_start_when_it_knows_where_to_go(lines: Any, order: Resume | Replay) -> None:
    ours, presence, _ = lines

    ours.send(order)

    assert presence.may_start.wait(LIMIT_S)
    assert presence.order == order


def test_what_came_too_early_is_handed_over_in_its_order(lines: Any) -> None:
    ours, presence, _ = lines
    heard: queue.Queue[str] = queue.Queue()
    for number in range(3):
        ours.send(from_rank.Put(1, str(number), ""))
    ours.send(Freeze((1,), 2, lost=(0,)))
    next(ours.messages())

    presence.hand_over(lambda message: heard.put(message.key), lambda generation: None)
    early = heard.qsize()
    ours.send(from_rank.Put(1, "3", ""))

    assert [heard.get(timeout=LIMIT_S) for _ in range(4)] == ["0", "1", "2", "3"]
    assert early == 3


def test_who_takes_over_begins_in_the_generation_that_was_answered_last(lines: Any) -> None:
    ours, presence, _ = lines
    session = make_session(rank=1, local_rank=1, generation=presence.generation)
    recovery = Recovery(session)
    ours.send(Freeze((1,), 2, lost=(0,)))
    next(ours.messages())

    presence.hand_over(recovery.take, recovery.begin_in)

    assert session.generation == 2
    session.channel.close()


def test_what_is_no_message_is_reported_to_the_agent_and_has_no_effect(lines: Any) -> None:
    ours, presence, _ = lines

    ours.sock.sendall(b'{"op": "Freeze", "generation": "2"}\n')
    ours.send(Freeze((1,), 3, lost=(0,)))

    reason = "Freeze: Expected `int`, got `str` - at `$.generation`"
    assert up_to_frozen(ours) == [
        from_rank.Note(f"a message from the agent is ignored: {reason}"),
        from_rank.RankFrozen(3, 0),
    ]
    assert presence.generation == 3
