"""Events that can open an incident: each has a kind, and a sentence for the operator. Data only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from ttprun.recovery.event import Event, RankEvent

_OF_WORKER = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal: Killed|exited unexpectedly)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(RankEvent):
    """A rank's process has ended.

    pid                the process; an exit of any other than the rank's present one is an echo
    code               exit code, None if a signal ended it; 0 says that the script has finished
    signal             number of the signal, else None
    boundary           newest boundary in the rank's record, 0 if it never had one
    detected_after_s   seconds between the death and the agent's seeing it
    is_script_error    the script's own uncaught exception ended it
    device_fault       what has happened to its device, "" if nothing is known of that
    reason             root cause if the agent knows it, else ""
    """

    pid: int
    code: int | None
    signal: int | None
    boundary: int
    detected_after_s: float = 0.0
    is_script_error: bool = False
    device_fault: str = ""
    reason: str = ""

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
            how = f"was ended by signal {self.signal}"
        else:
            how = "ended" if self.code is None else f"exited with code {self.code}"
        return f"rank {self.rank} {how} at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingRankLost(RankEvent):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFaulted(LivingRankLost):
    """A transient error has ended a rank's script; the process lives, and waits for orders to run it again.

    detected_after_s   the rank says so at once
    device_fault       what has happened to its device, "" if it is another error
    reason             the error
    """

    device_fault: str = ""

    @property
    def kind(self) -> str:
        """The fault in a word: "exception", "memory-persistent"."""
        return self.device_fault or "exception"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        what = f"a device fault ({self.device_fault})" if self.device_fault else "an error"
        return f"rank {self.rank} met {what} at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHung(LivingRankLost):
    """A rank's process is there, but does not get on while others wait for it. It is killed, and then lost.

    detected_after_s   seconds since it last got on
    reason             how it hangs: phase, collective, how long, innermost frame
    is_in_script       in a step, in a call of the script's that does not return: a new process may come there again
    """

    is_in_script: bool = False
    kind: ClassVar[str] = "hang"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} hung at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDiverged(LivingRankLost):
    """A rank's weights differ from the majority's. It is killed, and so lost; its replacement gets the majority's.

    detected_after_s   not known: a replica may have diverged at any moment since all were last alike
    reason             at which boundary it was seen
    """

    kind: ClassVar[str] = "divergence"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} has diverged ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """A node is lost with all of its ranks: its agent is not heard any more.

    ranks              all of its ranks
    name               of the node, for people
    boundary           newest boundary that one of its ranks is known to have recorded
    detected_after_s   seconds since the node was last heard
    reason             how it was noticed
    """

    ranks: tuple[int, ...]
    name: str
    boundary: int
    detected_after_s: float = 0.0
    reason: str = ""

    kind: ClassVar[str] = "node-lost"
    is_script_error: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        """The lowest one, by which the fault is recognized if it comes back."""
        return self.ranks[0]

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        ranks = ", ".join(map(str, self.ranks))
        who = f"rank{'s' if len(self.ranks) != 1 else ''} {ranks}"
        return f"{self.name} was lost with {who} at boundary {self.boundary}{_cause(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBroken(Event):
    """A connection between ranks is broken or silent, though every process lives and all ranks are equally far.

    generation         of the connections
    boundary           newest boundary that all ranks have passed
    rank               whose device has lost a link; None: none, or unknown
    detected_after_s   seconds since anything last moved
    device_fault       the device fault, "" if it is none
    reason             who noticed, and how
    """

    generation: int
    boundary: int
    rank: int | None = None
    detected_after_s: float = 0.0
    device_fault: str = ""
    reason: str = ""

    @property
    def kind(self) -> str:
        """The fault in a word: "connection", "link"."""
        return self.device_fault or "connection"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"the connections broke at boundary {self.boundary} ({self.reason})"


def _cause(reason: str) -> str:
    return f" ({reason})" if reason else ""
