"""A pause: all ranks wait behind one and the same step, since a scheduler has asked for it.

The agent asks on the board. The first rank of the node notes there behind which step all wait, before it announces that
it is ready for that step's update; the others look there once the update is over, for which all had to be ready. So no
rank goes past the pause while others wait in it. Begin with `Pauses.wait`.
"""

from __future__ import annotations

from collections.abc import Callable

from ttprun.protocol import from_rank
from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.rank.session import Session

_LOOK_AGAIN_S = 0.1


class Pauses:
    """What a rank does for a pause."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def agree(self, step: int) -> None:
        """Before the update that makes `step` is announced: the first rank says whether all wait behind it."""
        session, board = self._session, self._session.board
        is_open = board.get(LEADER, Field.PAUSE_AT) <= session.applied
        if session.local_rank == LEADER and board.get(LEADER, Field.PAUSE_ASKED) and is_open:
            board.set(LEADER, Field.PAUSE_AT, step)

    def wait(self, sync: Callable[[], None], admit: Callable[[], None]) -> None:
        """Wait if all do behind the newest step; ended by the agent, or by what `admit` raises when a recovery begins.

        sync   called in front of the wait: waits for whatever runs on the device
        """
        session = self._session
        number = session.board.get(LEADER, Field.PAUSE_ASKED)
        if not self._is_on(number):
            return
        sync()
        session.touch(Phase.COMMITTING)  # whoever does not come is found as one that others wait for in front of a step
        session.channel.send(from_rank.Paused(number))
        with session.changed:
            while self._is_on(number):
                admit()
                session.changed.wait(_LOOK_AGAIN_S)
        session.touch(Phase.COMPUTING)

    def _is_on(self, number: int) -> bool:
        board = self._session.board
        is_asked = number != 0 and board.get(LEADER, Field.PAUSE_ASKED) == number
        return is_asked and board.get(LEADER, Field.PAUSE_AT) == self._session.applied
