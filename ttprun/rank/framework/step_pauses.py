"""A pause: all ranks wait after the same step, at a scheduler's request.

The agent writes the request to the board. The first rank of the node writes the step after which all wait there, before
it announces that it is ready for that step's update; the others read it after the update, for which all had to be
ready. So no rank passes the pause while others wait in it. Begin with `Pauses.wait`.
"""

from __future__ import annotations

from collections.abc import Callable

from ttprun.protocol import mindio
from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.rank.session import Session

_LOOK_AGAIN_S = 0.1


class Pauses:
    """A rank's part in a pause."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def agree(self, step: int) -> None:
        """Before the update to `step` is announced: the first rank decides whether all wait after it."""
        session, board = self._session, self._session.board
        is_open = board.get(LEADER, Field.PAUSE_AT) <= session.applied
        if session.local_rank == LEADER and board.get(LEADER, Field.PAUSE_ASKED) and is_open:
            board.set(LEADER, Field.PAUSE_AT, step)

    def wait(self, sync: Callable[[], None], admit: Callable[[], None]) -> None:
        """Wait if the pause is after the newest step; ended by the agent, or by `admit`, which raises in a recovery.

        sync   called before the wait: waits for all work on the device
        """
        session = self._session
        number = session.board.get(LEADER, Field.PAUSE_ASKED)
        if not self._is_on(number):
            return
        sync()
        session.touch(Phase.COMMITTING)  # a missing rank is detected as one that others wait for before a step
        session.channel.send(mindio.Paused(number))
        with session.changed:
            while self._is_on(number):
                admit()
                session.changed.wait(_LOOK_AGAIN_S)
        session.touch(Phase.COMPUTING)

    def _is_on(self, number: int) -> bool:
        board = self._session.board
        is_asked = number != 0 and board.get(LEADER, Field.PAUSE_ASKED) == number
        return is_asked and board.get(LEADER, Field.PAUSE_AT) == self._session.applied
