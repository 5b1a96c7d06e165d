"""The collectives that a replacement must issue: those in the survivors' journals since the boundary.

Each of its own is compared before it is issued. A difference (another branch, shape or order) means that the
replacement does not repeat the lost rank: nothing is communicated, and the next rung is tried.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from ttprun.protocol import from_rank, rank_events
from ttprun.protocol.from_rank import CARRIED
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    from ttprun.groups.entry import Entry
    from ttprun.protocol.channel import Channel

_KILL_LIMIT_S = 60.0


class MismatchError(RuntimeError):
    """The replacement does not repeat the lost rank."""

    is_meant_for_script = True


class Expected:
    """The survivors' collectives by group, oldest first; empty once the replacement has issued them all.

    is_proved   False: that is reported only once the step has been compared with what the lost rank has left of it
    """

    def __init__(
        self, channel: Channel, generation: int, by_group: dict[str, list[str]], is_proved: bool = True
    ) -> None:
        self._channel = channel
        self._generation = generation
        self._is_proved = is_proved
        self._left = {name: list(reversed(signatures)) for name, signatures in by_group.items() if signatures}
        carried = {name: len(self._left.pop(name)) for name in list(self._left) if name.startswith(CARRIED)}
        self._carried = Counter({name.removeprefix(CARRIED): count for name, count in carried.items()})
        self._report_if_done()

    def take_carried(self, entry: Entry) -> bool:
        """Whether survivors' threads wait for this thread's own operation since before the boundary."""
        self._carried[entry.sequence] -= 1
        return self._carried[entry.sequence] >= 0

    def awaits(self, entry: Entry) -> bool:
        """Whether survivors have issued more in an operation's group since the boundary."""
        return entry.sequence in self._left

    def check(self, entry: Entry) -> None:
        """Compare a collective that is about to be issued. Raises MismatchError, after reporting it to the agent."""
        awaited = self._left.get(entry.sequence)
        if not awaited or entry.is_carried:
            return
        expected = awaited.pop()
        if expected != entry.signature:
            report_mismatch(
                self._channel,
                self._generation,
                Reason(
                    "other-collective",
                    f"the replacement issues '{entry.signature.strip()}' where the survivors have '{expected.strip()}'",
                ),
            )
        if not awaited:
            del self._left[entry.sequence]
            self._report_if_done()

    def note_proved(self) -> None:
        """The comparison with the lost rank is over."""
        if not self._is_proved:
            self._is_proved = True
            self._report_if_done()

    def _report_if_done(self) -> None:
        if not self._left and self._is_proved:
            self._channel.send(from_rank.RankReissued(self._generation))


def report_mismatch(
    channel: Channel, generation: int, reason: Reason, is_contradiction: bool = True, is_near: bool = False
) -> None:
    """Report why this rank must not continue, and wait until the agent kills the process, _KILL_LIMIT_S at most.

    generation                  the session's
    reason                      why
    is_contradiction, is_near   as in rank_events.MismatchFound

    Raises MismatchError, if it has not been killed by then.
    """
    channel.send(rank_events.MismatchFound(generation, reason, is_contradiction=is_contradiction, is_near=is_near))
    threading.Event().wait(_KILL_LIMIT_S)
    raise MismatchError(reason)
