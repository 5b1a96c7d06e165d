"""Copies of records on another node: what the ring keeps is all that a replay elsewhere needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.rank.fakes import RECORD_BYTES, FakeChannel, make_session
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange
from ttprun.introspect.current_rank import Rank as Session
from ttprun.protocol import from_rank
from ttprun.protocol.board import Board
from ttprun.rank.step.copies import Copies

PLACE = (1, 0, 3, 40)
LIMIT_S = 60.0


class Line(FakeChannel):
    """Passes on to the others what a rank puts into the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Exchange] = []

    def send(self, message: object, fds: object = ()) -> None:
        if isinstance(message, from_rank.Put):
            for other in self.others:
                other.deliver(message.generation, message.key, message.value)


@dataclass
class Rank:
    """A rank on a node of its own, and the recorder in which it keeps another's records."""

    session: Session
    kept: Recorder
    copies: Copies

    def keep_up(self, boundary: int, generation: int = 0, may_stop: Callable[[], bool] = lambda: False) -> bool:
        return self.copies.keep_up(generation, boundary, may_stop, 0.2)


@pytest.fixture
def ring() -> Iterator[list[Rank]]:
    """Three nodes of one rank each."""
    ranks, lines = [], [Line() for _ in range(3)]
    for rank, line in enumerate(lines):
        board = Board.create(3)[1]
        session = make_session(
            channel=line, board=board, rank=rank, world_size=3, ranks_here=1, exchange=Exchange(line, "127.0.0.1")
        )
        fd = Recorder.create(RECORD_BYTES)
        ranks.append(Rank(session, Recorder(fd, RECORD_BYTES), Copies(session, fd)))
    for rank in ranks:
        lines[rank.session.rank].others = [other.session[Exchange] for other in ranks if other is not rank]
    yield ranks
    for rank in ranks:
        rank.copies.cut()
        rank.session.channel.close()


def record(rank: Rank, boundary: int) -> None:
    """What a rank writes in the step up to a boundary."""
    recorder, number = rank.session[Recorder], rank.session.rank
    recorder.write(boundary, b"head %d of %d" % (boundary, number), [torch.full((1000,), float(boundary))])
    recorder.append_log(b"result %d of %d" % (boundary, number))
    recorder.write_worker((1, 0, number, boundary), b"worker %d" % boundary)
    recorder.set_appended(12345, (boundary, 700, 80))


def all_keep_up(ranks: list[Rank], boundary: int, generation: int = 0) -> None:
    threads = [threading.Thread(target=rank.keep_up, args=(boundary, generation)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_the_node_after_keeps_what_a_rank_has_recorded_at_every_boundary(ring: list[Rank]) -> None:
    ring[0].session[Recorder].append_log(b"of the set-up")

    for boundary in range(1, 8):
        for rank in ring:
            record(rank, boundary)
        all_keep_up(ring, boundary)

    for rank in ring:
        after = ring[(rank.session.rank + 1) % 3]
        assert after.kept.newest == 7
        assert after.kept.export(7) == rank.session[Recorder].export(7)


def test_a_new_generation_sends_all_anew_to_who_has_nothing(ring: list[Rank]) -> None:
    for rank in ring:
        record(rank, 1)
    all_keep_up(ring, 1)
    empty = Recorder.create(RECORD_BYTES)
    ring[1].copies.cut()
    ring[1].copies, ring[1].kept = Copies(ring[1].session, empty), Recorder(empty, RECORD_BYTES)

    for rank in ring:
        rank.session.generation = 1
        record(rank, 2)
    all_keep_up(ring, 2, generation=1)

    assert ring[1].kept.export(2) == ring[0].session[Recorder].export(2)


def test_a_wait_for_a_node_that_does_not_come_ends_when_it_may(ring: list[Rank]) -> None:
    record(ring[0], 1)
    answers = iter([False, False, True])

    is_kept = ring[0].keep_up(1, may_stop=lambda: next(answers))

    assert not is_kept
    assert list(answers) == []


def test_who_is_gone_is_an_error_for_both_its_neighbours(ring: list[Rank]) -> None:
    for rank in ring:
        record(rank, 1)
    all_keep_up(ring, 1)

    ring[1].copies.cut()

    record(ring[2], 2)
    with pytest.raises(OSError, match=r"closed|reset|pipe"):
        ring[2].keep_up(2, may_stop=lambda: False)
