"""A pause of all ranks between two steps, asked for on the board: see `ttprun.rank.framework.step_pauses`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.protocol.board import LEADER, Field


class Pause:
    """The pause of a node's ranks; at most one at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._number = 0
        self.begin_group()

    def begin_group(self) -> None:
        """All ranks are new, and nobody waits."""
        self.is_asked = False
        self._ends_s: float | None = None
        self._waiting: set[int] = set()
        self._given_up: Callable[[], None] = lambda: None
        self._then: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """All ranks wait."""
        return self.is_asked and len(self._waiting) == len(self._node.slots)

    def begin(self, limit_s: float, given_up: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Have all ranks wait behind their next step.

        limit_s    seconds after which they go on by themselves
        given_up   called when they have
        then       called once all wait, and begins something that has deadlines of its own
        """
        self.begin_group()
        self.is_asked, self._given_up, self._then = True, given_up, then
        self._number += 1
        self._ends_s = time.monotonic() + limit_s
        board = self._node.board
        board.set(LEADER, Field.PAUSE_AT, 0)
        board.set(LEADER, Field.PAUSE_ASKED, self._number)

    def end(self) -> None:
        """Let the ranks go on; nothing happens if none was asked to wait."""
        if self.is_asked:
            self.begin_group()
            self._node.board.set(LEADER, Field.PAUSE_ASKED, 0)

    def take(self, slot: RankSlot, number: int) -> None:
        """A rank waits."""
        if not self.is_asked or number != self._number:
            return
        self._waiting.add(slot.rank)
        if self.is_complete and self._then is not None:
            then, self._then, self._ends_s = self._then, None, None
            then()

    def look(self) -> None:
        """End a pause that has lasted long enough."""
        if self._ends_s is not None and time.monotonic() > self._ends_s:
            given_up = self._given_up
            self.end()
            given_up()
