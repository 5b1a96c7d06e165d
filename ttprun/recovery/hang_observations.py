"""A rank as the agent sees it: at one moment (`Observation`), and from one moment to the next (`Track`).

`HangLimits` says how long a rank may stand still: set by the user, or learnt from the steps so far.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

WORK_WINDOW_S = 1.0
WORK_SHARE = 0.05  # of one CPU: waiting threads use less


class Doing(StrEnum):
    """What a rank's main thread does, as far as its hooks know."""

    STARTING = "starting"
    SETUP = "setup"
    COMPUTING = "computing"
    COLLECTIVE = "collective"
    WAITING = "waiting"
    CONNECTING = "connecting"
    COMMITTING = "committing"
    STEPPING = "stepping"
    REPLAYING = "replaying"
    REPAIRING = "repairing"
    SAVING = "saving"
    FINISHED = "finished"


IN_COLLECTIVE = (Doing.COLLECTIVE, Doing.WAITING)
WAITING = (*IN_COLLECTIVE, Doing.CONNECTING, Doing.COMMITTING, Doing.FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A rank as the agent sees it at one moment.

    boundary      optimizer steps that it has completed
    meetings      collectives of the whole world that it has come to since
    operation     name of the newest collective
    seen_at_s     when its hooks last noted anything
    pulse_at_s    when its heartbeat's thread last got the GIL; 0 if it has never beaten
    beats         heartbeats that its main thread has answered
    cpu_s         processor time of the process so far
    is_stopped    by a signal, and not by a debugger
    is_in_io      its main thread waits for a disk or a file system
    """

    rank: int
    pid: int
    boundary: int
    meetings: int
    doing: Doing
    operation: str = ""
    seen_at_s: float = 0.0
    pulse_at_s: float = 0.0
    beats: int = 0
    cpu_s: float = 0.0
    is_stopped: bool = False
    is_in_io: bool = False

    @property
    def place(self) -> tuple[int, int, bool, bool]:
        """How far it is; a rank that others wait for has a lower place than they."""
        return self.boundary, self.meetings, self.doing is Doing.COMMITTING, self.doing is Doing.FINISHED

    @property
    def is_waiting(self) -> bool:
        """It can only get on when others do."""
        return self.doing in WAITING

    @property
    def where(self) -> str:
        """Its place in words: "in allreduce, number 3 of step 12"."""
        if self.doing is Doing.CONNECTING:
            return f"for its process group to connect, in step {self.boundary}"
        if self.doing is Doing.COMMITTING:
            return f"before its optimizer step {self.boundary}"
        if self.doing in IN_COLLECTIVE:
            return f"in {self.operation}, number {self.meetings} of step {self.boundary}"
        return f"{self.doing}, in step {self.boundary}"


@dataclass(slots=True)
class Track:
    """What is remembered of one process.

    progressed_at_s   when it last got on
    worked_at_s       when it last showed that it works: it got on, ran bytecode, or used the processor
    stopped_at_s      when it was first seen stopped, None if it is not
    """

    observation: Observation
    progressed_at_s: float
    worked_at_s: float
    stopped_at_s: float | None = None
    cpu: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, at_s: float, observation: Observation) -> None:
        """Compare with what was seen last."""
        before = self.observation
        self.observation = observation
        if (before.place, before.doing, before.seen_at_s) != (
            observation.place,
            observation.doing,
            observation.seen_at_s,
        ):
            self.progressed_at_s = at_s
        self.cpu.append((at_s, observation.cpu_s))
        while len(self.cpu) > 2 and self.cpu[1][0] <= at_s - WORK_WINDOW_S:
            self.cpu.popleft()
        if (
            self.is_computing(at_s)
            or observation.is_in_io
            or (before.beats != observation.beats and observation.doing is not Doing.WAITING)
            or self.progressed_at_s == at_s
            or not observation.pulse_at_s
        ):
            self.worked_at_s = at_s
        if not observation.is_stopped:
            self.stopped_at_s = None
        elif self.stopped_at_s is None:
            self.stopped_at_s = at_s

    def is_computing(self, at_s: float) -> bool:
        """Whether it has used the processor of late."""
        if not self.cpu:
            return False
        since_s, used_s = self.cpu[0]
        return used_s < self.observation.cpu_s - WORK_SHARE * max(at_s - since_s, WORK_WINDOW_S)

    def shift(self, by_s: float) -> None:
        """Leave out a time in which the agent did not look."""
        self.progressed_at_s += by_s
        self.worked_at_s += by_s
        self.stopped_at_s = None if self.stopped_at_s is None else self.stopped_at_s + by_s
        self.cpu.clear()


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
