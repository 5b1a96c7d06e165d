"""A rank that has come to its end waits for another, but not for ever: the other may wait for its exit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.groups import departure
from ttprun.groups.departure import OthersPatience
from ttprun.protocol import patience
from ttprun.protocol.board import Board, Field, Phase


@pytest.mark.parametrize(("crowd", "looks"), [(1.0, 11), (4.0, 41)])
def test_a_rank_that_waits_in_one_collective_is_waited_for_as_long_as_a_busy_machine_needs(
    monkeypatch: pytest.MonkeyPatch, crowd: float, looks: int
) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(patience, "crowd", lambda: crowd)
    _, board = Board.create(2)
    board.set(1, Field.PHASE, Phase.COLLECTIVE)
    session: Any = SimpleNamespace(board=board, is_holding=False)
    waits = OthersPatience(session, 5.0)

    asked = [waits.is_over([1])]
    while not asked[-1]:
        clock.now_s += 0.5
        asked.append(waits.is_over([1]))

    assert len(asked) - 1 == looks


def test_a_rank_leaves_only_when_its_recovery_thread_has_reported_that_the_repair_is_over() -> None:
    _, board = Board.create(2)
    board.announce(1, Field.ENDED, 1)
    asked: list[float] = []

    def is_idle(limit_s: float) -> bool:
        asked.append(limit_s)
        return len(asked) == 3

    session: Any = SimpleNamespace(
        rank=0,
        board=board,
        made=SimpleNamespace(count=1),
        framework=None,
        recovery=SimpleNamespace(is_idle=is_idle),
        is_repairable=lambda: True,
        share_row=lambda: None,
        touch=lambda phase: None,
    )

    departure.stay(session)

    assert len(asked) == 3
