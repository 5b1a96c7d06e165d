"""The board: what ranks of a node see of each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ttprun.protocol.board import FINISHED, ROW_FIELDS, Board, Field, Phase

LIMIT_S, FOR_EVER_S = 60.0, 6000.0


@pytest.fixture
def board_fd() -> Iterator[int]:
    fd, _ = Board.create(3)
    yield fd
    os.close(fd)


def test_what_one_process_writes_another_reads(board_fd: int) -> None:
    pid = os.fork()
    if pid == 0:
        Board(board_fd, 3).set(1, Field.RECORDED, 41)
        os._exit(0)
    os.waitpid(pid, 0)

    board = Board(board_fd, 3)

    assert board.get(1, Field.RECORDED) == 41


@pytest.mark.parametrize(
    "value", [0, 1, -1, (1 << 31) - 1, 1 << 31, (1 << 32) + 5, FINISHED, -(1 << 63), (1 << 63) - 1]
)
def test_a_field_holds_any_number_of_64_bits_and_its_neighbours_stay(board_fd: int, value: int) -> None:
    board = Board(board_fd, 3)

    board.set(1, Field.APPLIED, value)

    everything = {(rank, field): board.get(rank, field) for rank in range(3) for field in range(ROW_FIELDS)}
    assert {place for place, found in everything.items() if found} == ({(1, Field.APPLIED)} if value else set())
    assert board.get(1, Field.APPLIED) == value


@pytest.mark.parametrize("seen", [0, 7, -1, 1 << 31, FINISHED])
def test_a_rank_that_waits_is_woken_by_the_announcement(board_fd: int, seen: int) -> None:
    board = Board(board_fd, 3)
    board.set(2, Field.RECORDED, seen)
    woken = threading.Event()

    def wait() -> None:
        while board.get(2, Field.RECORDED) == seen:
            board.wait_for_change(2, Field.RECORDED, seen, FOR_EVER_S)
        woken.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    Board(board_fd, 3).announce(2, Field.RECORDED, 3)

    assert woken.wait(LIMIT_S)


def test_a_rank_that_waits_lets_other_threads_run(board_fd: int) -> None:
    """The wait gives the interpreter away: else the recovery thread could not end it."""
    board, seen_at_the_end = Board(board_fd, 3), []

    def wait() -> None:
        board.wait_for_change(0, Field.RECORDED, 0, LIMIT_S)
        seen_at_the_end.append(board.get(0, Field.RECORDED))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()

    while waiter.is_alive():
        board.announce(0, Field.RECORDED, 1)
        waiter.join(0.001)

    assert seen_at_the_end == [1]  # 0: this thread had no turn before the wait's time was over


def test_a_ranks_row_is_its_own_and_a_column_is_of_all_ranks(board_fd: int) -> None:
    board = Board(board_fd, 3)
    row, column = board.row(1), board.column(Field.PHASE)

    row[Field.PHASE] = Phase.STEPPING
    board.set(2, Field.PHASE, Phase.COLLECTIVE)
    board.set(2, Field.APPLIED, 7)

    assert list(column) == [Phase.STARTING, Phase.STEPPING, Phase.COLLECTIVE]
    assert row[Field.APPLIED] == 0
    assert board.get(1, Field.PHASE) == Phase.STEPPING
