"""A process that runs its rank's set-up ahead has memory of its own, and then the rank's at the same addresses."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest

from tests.rank.records import record_of
from ttprun.capture.effects.kept import keep_origin
from ttprun.capture.records.packing import pack
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.results import Answers
from ttprun.protocol.board import Board, Field
from ttprun.rank.bootstrap.ahead import Ahead

SLOT_MIB = 1


def welcome() -> Any:
    options = types.SimpleNamespace(record_limit_mib=SLOT_MIB)
    return types.SimpleNamespace(rank=1, world_size=2, options=options)


def of_rank() -> tuple[list[int], Board, Recorder]:
    """(descriptors, board, recorder) of a rank that lives."""
    fd, board = Board.create(2)
    records = Recorder.create(SLOT_MIB << 20)
    recorder = Recorder(records, SLOT_MIB << 20)
    recorder.write(4, pack(record_of(4)), [])
    keep_origin(recorder, ("place", 1))
    return [fd, records, os.memfd_create("stack")], board, recorder


def test_until_its_rank_is_lost_it_writes_to_memory_of_its_own() -> None:
    fds, board, recorder = of_rank()
    board.set(1, Field.RECORDED, 4)

    ahead = Ahead(welcome(), fds)
    own, records = Board(ahead.fds[0], 2), Recorder(ahead.fds[1], SLOT_MIB << 20)
    own.set(1, Field.PULSE_NS, 7)
    records.append_log(b"of the set-up")

    assert ahead.sample.fields.boundary == own.get(1, Field.RECORDED) == 4
    assert board.get(1, Field.PULSE_NS) == 0
    assert len(list(recorder.read_log())) == 1


def test_when_its_rank_is_lost_all_that_it_has_mapped_is_the_ranks() -> None:
    fds, board, recorder = of_rank()
    ahead = Ahead(welcome(), fds)
    own, row, records = Board(ahead.fds[0], 2), Board(ahead.fds[0], 2).row(1), Recorder(ahead.fds[1], SLOT_MIB << 20)
    own.set(1, Field.PULSE_NS, 7)
    own.set(1, Field.MAIN_BEATS, 5)
    board.set(0, Field.RECORDED, 9)
    recorder.write(5, pack(record_of(5)), [])

    ahead.end()
    own.announce(1, Field.APPLIED, 5)
    records.append_log(b"of the replacement")

    assert (own.get(0, Field.RECORDED), board.get(1, Field.APPLIED), row[Field.APPLIED]) == (9, 5, 5)
    assert (board.get(1, Field.PULSE_NS), board.get(1, Field.MAIN_BEATS)) == (7, 6)
    assert records.newest == 5
    assert list(recorder.read_log())[1:] == [b"of the replacement"]


def test_a_rank_without_a_record_has_no_set_up_that_could_be_run_ahead() -> None:
    fds, _, recorder = of_rank()
    recorder.clear()

    with pytest.raises(LookupError):
        Ahead(welcome(), fds)


def test_a_result_of_a_later_step_shows_that_the_set_up_would_be_answered_otherwise() -> None:
    answers = Answers((), [(0, "seed", [b"a"]), (0, "epoch", [b"a"]), (3, "epoch", [b"b"])])

    assert [answers.has_newer(place, 5) for place in ("seed", "epoch", "unknown")] == [False, True, False]
    assert not answers.has_newer("epoch", 2)
