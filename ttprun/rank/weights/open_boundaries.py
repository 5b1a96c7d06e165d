"""Open boundaries: behind them the script may still go backward through what it has computed in front of them.

A GAN's discriminator learns from `fake.detach()`, and behind its step the generator from `fake` itself: at the
boundary between the two what `fake` was computed from is needed, and in no record. Nothing can go on from there, nor
from a snapshot or checkpoint of it; from the boundary behind the generator's step it can. So snapshots are put off to
the next boundary (`snapshots.py`), and a job that is to end trains on up to it (`ttprun.agent.standing`).

Whether one is open is foreseen from the graphs that are still there (`values/histories.py`): where that is wrong, a run
is refused that goes on from a boundary (`values/unrecorded.py`), or a snapshot comes a few steps late.
"""

from __future__ import annotations

import time

from ttprun.protocol.board import LEADER, Field, Phase
from ttprun.rank.session import Session

MOST_PUT_OFF = 8  # boundaries; a script that keeps a graph all the time is never to be seen without one
_HOLD_LIMIT_S = 5.0  # the agent looks several times a second
_LOOK_AGAIN_S = 0.05


def come_to(session: Session, boundary: int) -> None:
    """The first rank, in front of the announcement of an open boundary: note it.

    If the agent waits for a boundary that is not, and the newest is such a one, this rank does not go past it: it waits
    to be frozen, for _HOLD_LIMIT_S at most, and then until the freeze is over. The others cannot step without it: one
    that has not heard of the freeze yet would, if this rank announced that it has recorded the next boundary.
    """
    if session.local_rank != LEADER:
        return
    give_up_at_s = time.monotonic() + _HOLD_LIMIT_S
    with session.changed:
        while _is_to_stand(session) and (session.is_holding or time.monotonic() < give_up_at_s):
            session.touch(Phase.COMMITTING)
            session.changed.wait(_LOOK_AGAIN_S)
    session.board.set(LEADER, Field.OPEN_AT, boundary)


def _is_to_stand(session: Session) -> bool:
    is_asked = session.board.get(LEADER, Field.STAND_ASKED) != 0 and not session.unprotected
    return is_asked and 0 < session.applied != session.board.get(LEADER, Field.OPEN_AT)
