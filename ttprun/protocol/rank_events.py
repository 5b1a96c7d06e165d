"""What has happened to a rank or a node, as the state machine takes it: in the past tense. Data only.

An agent that does not lead sends its own to the one that does, which stamps them anew. Every event carries `at_s`,
seconds on a monotonic clock, stamped where the event came in: the machine has no clock.
Those that a rank sends about a repair carry the generation they belong to; `machine.is_echo` drops those of another.

For each rank the agent must keep the order of things: RankStarted before anything else of that process, then all that
the process has sent, then its RankExited. After KillRank nothing of that process may come but its RankExited. Between
ranks any order will do.
"""

from __future__ import annotations

import re
import signal
from typing import Any, ClassVar

from ttprun.protocol.codec import Message
from ttprun.protocol.reason import Reason

_OF_WORKER = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal: Killed|exited unexpectedly)")


class Event(Message, frozen=True, kw_only=True):
    """Something happened.

    at_s   seconds, monotonic, never less than that of the event before
    """

    at_s: float


class RankEvent(Event, frozen=True, kw_only=True):
    """Something happened to one rank.

    rank   0 .. world_size - 1
    """

    rank: int


class OfRank(RankEvent, frozen=True, kw_only=True):
    """A rank reports it. `rank` and `at_s` are filled in by the agent that takes it, whatever the rank has sent."""

    at_s: float = 0.0
    rank: int = -1


class RepairEvent(OfRank, frozen=True):
    """A rank reports on a repair.

    generation   that of the order which the rank has carried out
    """

    generation: int


class RankStarted(RankEvent, frozen=True, kw_only=True):
    """A process has been started for a rank, or a standby has been given it.

    pid          from now on the rank's present pid
    had_standby  a standby was ready for it; None: its launcher does not say so
    """

    pid: int
    had_standby: bool | None = None


class SpawnFailed(RankEvent, frozen=True, kw_only=True):
    """No process can be started for a rank: the machine has not what it takes.

    reason   what the system says
    """

    reason: str


class RankExited(RankEvent, frozen=True, kw_only=True):
    """A rank's process has ended.

    pid                the process; an exit of any other than the rank's present one is an echo
    code               exit code, None if a signal ended it; 0 says that the script has finished
    signal             number of the signal, else None
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   seconds between the death and the agent's seeing it
    is_script_error    the script's own uncaught exception ended it
    device_fault       what has happened to its device, "" if nothing is known of that
    reason             root cause if the agent knows it, else ""
    traceback          of the script's error, as in `Failure`; only between nodes
    crashed_at         the script's line in which native code has crashed; "": no crash, or the line is not known
    """

    pid: int
    code: int | None
    signal: int | None
    boundary: int
    detected_after_s: float = 0.0
    is_script_error: bool = False
    device_fault: str = ""
    reason: str = ""
    traceback: str = ""
    crashed_at: str = ""

    @classmethod
    def ended(cls, exit_code: int, **fields: Any) -> RankExited:
        """That of a process which has ended with an exit code, or minus the signal that ended it."""
        has_code = exit_code >= 0
        return cls(code=exit_code if has_code else None, signal=None if has_code else -exit_code, **fields)

    @property
    def exit_code(self) -> int:
        """The process's, or minus the signal that ended it."""
        return -self.signal if self.signal is not None else self.code or 0

    @property
    def is_finish(self) -> bool:
        """The script came to its end; everything else is a fault."""
        return self.code == 0 and self.signal is None

    @property
    def is_of_worker(self) -> bool:
        """A DataLoader worker was killed, mostly because memory was short: the script itself has not failed."""
        return _OF_WORKER.search(self.reason) is not None

    @property
    def kind(self) -> str:
        """The fault in two words: "exception", "signal 9", "exit 3", "device-lost"."""
        if self.device_fault:
            return self.device_fault
        if self.is_script_error:
            return "exception"
        if self.signal is not None:
            return f"signal {self.signal}"
        return "exit" if self.code is None else f"exit {self.code}"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        if self.device_fault:
            how = f"ended with a device fault ({self.device_fault})"
        elif self.is_script_error and self.reason:
            return f"rank {self.rank} raised {self.reason} in step {self.boundary}"
        elif self.is_script_error:
            how = "ended with an uncaught exception"
        elif self.signal is not None:
            how = end_by(self.signal, is_named=bool(self.reason))
        else:
            how = "ended" if self.code is None else f"exited with code {self.code}"
        return f"rank {self.rank} {how} in step {self.boundary}{because(self.reason)}"


class LivingRankLost(RankEvent, frozen=True, kw_only=True):
    """A rank is lost though its process lives.

    pid                the process; if it is not the rank's present one, this is an echo
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   seconds from the fault until it was noticed
    reason             how it shows, or ""
    """

    pid: int | None
    boundary: int
    detected_after_s: float = 0.0
    reason: str = ""

    is_script_error: ClassVar[bool] = False


class MismatchFound(RepairEvent, frozen=True):
    """A check failed in a rank: its state must not be used.

    reason             which check, and the two values
    detail             a traceback, "" if there is none
    is_contradiction   False: too little is proved to join the others; all may resume from what is saved
    is_near            another replacement may get further: this one differs by rounding alone, which may not come
                       back, or it has found what the next one does otherwise
    """

    reason: Reason
    detail: str = ""
    is_contradiction: bool = True
    is_near: bool = False

    kind: ClassVar[str] = "mismatch"

    @property
    def why(self) -> Reason:
        """For the operator."""
        if self.is_near:
            return self.reason.within(f"rank {self.rank} is replaced once more: {self.reason}")
        what = "refused" if self.is_contradiction else "not proved"
        return self.reason.within(f"rank {self.rank} is {what} ({self.reason})")


class StopAsked(Event, frozen=True, kw_only=True):
    """The job must end, once its state is written: the user or the scheduler has asked.

    reason   who asked, and why
    signal   that the launcher of a node has got; 0: none
    """

    reason: str
    signal: int = 0


def end_by(number: int, is_named: bool) -> str:
    """How a signal has ended a process: "was killed (SIGKILL)"; is_named: the reason that follows begins with it."""
    if number == signal.SIGKILL:
        return "was killed (SIGKILL)"
    known = {each.value: each.name for each in signal.Signals}
    return "was ended" if is_named and number in known else f"was ended by {known.get(number, f'signal {number}')}"


def because(reason: str) -> str:
    """The reason as the end of a sentence; "" if there is none."""
    return f" ({reason})" if reason else ""
