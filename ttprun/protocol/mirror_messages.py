"""What a rank's mirror holds, as a number on the board: one for each of its two slots. Begin with `Held`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLOTS = 2  # for states; a third memory has results of collectives
_HAS_STATE = 1
_HAS_STEP = 2


class Held(NamedTuple):
    """The content of one slot.

    boundary   of which it holds the state; 0: it holds nothing
    has_state  the state after that boundary's step is complete
    has_step   what the next step needs is complete, too: the state that it begins with, and the gradients
    """

    boundary: int
    has_state: bool
    has_step: bool

    def pack(self) -> int:
        """The board's cell."""
        return self.boundary << 2 | self.has_state * _HAS_STATE | self.has_step * _HAS_STEP

    def gives(self, boundary: int) -> str:
        """How the state of a boundary comes from it: "state", by taking the "step" again, or "" if it does not."""
        if self.has_state and self.boundary == boundary:
            return "state"
        return "step" if self.has_step and self.boundary + 1 == boundary else ""

    def has_all_of(self, other: Held) -> bool:
        """Whether whatever the other one gives comes from it, too."""
        return self.boundary == other.boundary and self.has_state >= other.has_state and self.has_step >= other.has_step


NOTHING = Held(0, False, False)


def unpack(cell: int) -> Held:
    """The content that a cell of the board stands for."""
    return Held(cell >> 2, bool(cell & _HAS_STATE), bool(cell & _HAS_STEP))


def slot_that_gives(slots: Sequence[Held], boundary: int, way: str) -> int | None:
    """The number of the slot, of these, that gives the state of a boundary in this way (`Held.gives`); None: none."""
    return next((number for number, slot in enumerate(slots) if slot.gives(boundary) == way), None)


def slot_of(boundary: int) -> int:
    """The slot for the state of a boundary: its neighbours are in the other one."""
    return boundary % SLOTS
