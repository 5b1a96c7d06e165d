"""How long one process waits for another before it draws a conclusion.

"It has not come within so many seconds" says nothing on a machine that lets nobody run. So a second counts for less
where more threads want to run than there are processors, a look that comes late counts as one in time, and time in
which the other one could not have acted may be left out. Begin with `Patience.look`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from ttprun.protocol.board import LEADER, Board, Field

LOOK_S = 1.0  # between two looks at most; whoever comes later was held up itself
MOST_TIMES = 10.0  # no limit becomes longer than so many times itself
_AWAKE_NS = 1_500_000_000  # the agent's supervisor comes by several times a second


class Patience:
    """A limit for a wait.

    limit_s    on a machine that does nothing else
    counts     False: the time since the last look is left out
    is_scaled  False: whoever waits has no more time, however busy the machine is
    """

    def __init__(self, limit_s: float, counts: Callable[[], bool] = lambda: True, is_scaled: bool = True) -> None:
        self._limit_s = limit_s
        self._counts = counts
        self._is_scaled = is_scaled
        self._passed_s = 0.0
        self._looked_at_s = time.monotonic()

    @staticmethod
    def over(waits: Mapping[int, Patience]) -> list[int]:
        """Of many waits by number, those that are over: how busy the machine is, is asked once for all of them."""
        crowded = crowd()
        return [number for number, wait in waits.items() if wait.look(crowded=crowded)]

    def look(self, times: float = 1.0, crowded: float | None = None) -> bool:
        """Whether the limit is over; to be asked at least every LOOK_S.

        times     as many times as long the limit is at present, MOST_TIMES at most
        crowded   what `crowd` returns, if it has been asked
        """
        now = time.monotonic()
        if self._counts():
            slower = max(times, crowd() if crowded is None else crowded) if self._is_scaled else 1.0
            self._passed_s += min(now - self._looked_at_s, LOOK_S) / min(slower, MOST_TIMES)
        self._looked_at_s = now
        return self._passed_s > self._limit_s


def crowd() -> float:
    """How many threads want to run for each processor, at least 1."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return max(1.0, running / len(os.sched_getaffinity(0)))


def is_agent_awake(board: Board) -> bool:
    """Whether the agent of this node has looked around of late; one that is paused can order nothing."""
    looked_ns = board.get(LEADER, Field.AGENT_NS)
    return not looked_ns or time.monotonic_ns() - looked_ns < _AWAKE_NS
