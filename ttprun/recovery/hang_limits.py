"""How long a rank may not get on: set by the user, or learnt from the steps so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ttprun.recovery.observations import Doing, Observation

LEAST_LIMIT_S = 10.0  # learnt limits are never shorter
LEAST_STALL_S = 30.0
SETUP_LIMIT_S = 600.0  # before the first step nothing is known of the script
PAUSE_LIMIT_S = 120.0  # while a rank saves, or the others wait in a barrier: steps do not advance, and are no measure
OWN_CALL_LIMIT_S = 300.0  # in a sleep, a socket, a file, a child process, a lock: it may be an upload
OWN_CALL_TIMES = 2.0  # the longest step of the run, with such a pause in it
BUSY_LIMIT_S = 600.0


@dataclass(slots=True)
class HangLimits:
    """How long a rank may not get on, in seconds.

    hang_s      what the user has set; None: learnt from the steps so far
    longest_s   the longest step of the whole run
    """

    hang_s: float | None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    longest_s: float = 0.0

    def learn(self, took_s: float, times: int) -> None:
        """Take note of some steps that took so long each."""
        self.steps_s.extend([took_s] * times)
        self.longest_s = max(self.longest_s, took_s)

    @property
    def slowest_s(self) -> float:
        """The slowest recent step; with validation and checkpoints, if they lie within steps."""
        return max(self.steps_s, default=0.0)

    @property
    def usual_s(self) -> float | None:
        """What a step takes; None while too few are known."""
        return median(self.steps_s) if len(self.steps_s) >= 5 else None

    def hang_limit_s(self, observation: Observation, awaited: Observation | None = None) -> float:
        """For a rank that shows no sign of work: then it is named, and ended if it is shown to be stuck.

        awaited   a rank that waits for it
        """
        if self.hang_s is not None:
            return self.hang_s
        if observation.boundary == 0:
            return SETUP_LIMIT_S
        is_pause = observation.doing is Doing.SAVING or (awaited is not None and awaited.operation == "barrier")
        return max(PAUSE_LIMIT_S, self.stop_limit_s) if is_pause else self.stop_limit_s

    def own_limit_s(self, observation: Observation) -> float:
        """For a rank in a call of its own, which may return: nothing shows that it is stuck."""
        if self.hang_s is not None:
            return self.hang_s
        first_s = SETUP_LIMIT_S if observation.boundary == 0 else OWN_CALL_LIMIT_S
        return max(first_s, self.stop_limit_s, OWN_CALL_TIMES * self.longest_s)

    @property
    def stop_limit_s(self) -> float:
        """For a process that has been stopped: a script has no reason to do that, whatever it is at."""
        return self.hang_s if self.hang_s is not None else max(LEAST_LIMIT_S, 5 * self.slowest_s)

    @property
    def busy_limit_s(self) -> float:
        """For a rank that works. It must be found some day, for it may be an endless loop."""
        return 10 * self.hang_s if self.hang_s is not None else max(BUSY_LIMIT_S, 10 * self.slowest_s)

    def stall_limit_s(self, boundary: int) -> float:
        """For a collective in which all stand: a slow network is no broken one."""
        if self.hang_s is not None:
            return self.hang_s
        return SETUP_LIMIT_S if boundary == 0 else max(LEAST_STALL_S, 3 * self.stop_limit_s)
