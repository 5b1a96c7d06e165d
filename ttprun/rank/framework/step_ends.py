"""What is done at the end of a framework's steps: random states are kept, and a scheduler's pause is waited for."""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from ttprun.capture.records.recorder import Recorder
from ttprun.device import interface
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import mindio
from ttprun.protocol.board import LEADER, Field, Phase

# Random states of each step, kept in shared memory that outlives the process; MindIO does not restore them.
#
# A survivor has drawn in the step that is run again, a replacement has drawn nothing: both get the states from before
# the last update of the optimizer. Generators in a framework's own objects are not included.


def keep(session: Rank, step: int) -> None:
    """Keep the states with which all resume after `step`."""
    device = interface.current()
    record = {"generators": random_state.capture(), "device": device.rng_state()}
    session[Recorder].write(step, msgpack.packb(record), [])


def restore(session: Rank, step: int) -> bool:
    """Restore the states kept for `step`; False if there are none."""
    stored = session[Recorder].read(step)
    if stored is None:
        return False
    record = msgpack.unpackb(stored[0])
    random_state.restore(record["generators"])
    if record["device"]:  # empty if the process had not used its device yet
        interface.current().restore_rng_state(record["device"])
    return True


# A pause: all ranks wait after the same step, at a scheduler's request.
#
# The agent writes the request to the board. The first rank of the node writes the step after which all wait there,
# before it announces that it is ready for that step's update; the others read it after the update, for which all had
# to be ready. So no rank passes the pause while others wait in it. Begin with `Pauses.wait`.

_LOOK_AGAIN_S = 0.1


class Pauses:
    """A rank's part in a pause."""

    def __init__(self, session: Rank) -> None:
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
