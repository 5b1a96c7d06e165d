"""Events that can open an incident: each has a kind, and a sentence for the operator. Data only."""

from __future__ import annotations

from typing import ClassVar

from ttprun.protocol.rank_events import Event, LivingRankLost, because


class RankHung(LivingRankLost, frozen=True, kw_only=True):
    """A rank's process is there, but does not get on while others wait for it. It is killed, and then lost.

    detected_after_s   seconds since it last got on
    reason             how it hangs: phase, collective, how long, innermost frame
    is_in_script       in a step, in a call of the script's that does not return: a new process may come there again
    is_overdue         the process group's own time limit is over: under torchrun the job would end now
    """

    is_in_script: bool = False
    is_overdue: bool = False
    kind: ClassVar[str] = "hang"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} hung in step {self.boundary}{because(self.reason)}"


class RankDiverged(LivingRankLost, frozen=True, kw_only=True):
    """A rank's weights differ from the majority's. It is killed, and so lost; its replacement gets the majority's.

    detected_after_s   not known: a replica may have diverged at any moment since all were last alike
    reason             at which boundary it was seen
    """

    kind: ClassVar[str] = "divergence"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} has diverged ({self.reason})"


class NodeLost(Event, frozen=True, kw_only=True):
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
        return f"{self.name} was lost with {who} in step {self.boundary}{because(self.reason)}"


class ConnectionBroken(Event, frozen=True, kw_only=True):
    """A connection between ranks is broken or silent, though every process lives and all ranks are equally far.

    generation         of the connections
    boundary           newest boundary that all ranks have passed
    rank               whose device has lost a link; None: none, or unknown
    detected_after_s   seconds since anything last moved
    device_fault       the device fault, "" if it is none
    reason             who noticed, and how
    is_silent          nothing has broken, but nothing moves
    """

    generation: int
    boundary: int
    rank: int | None = None
    detected_after_s: float = 0.0
    device_fault: str = ""
    reason: str = ""
    is_silent: bool = False

    @property
    def kind(self) -> str:
        """The fault in a word: "connection", "link"."""
        return self.device_fault or "connection"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        if self.is_silent:
            return self.reason
        return f"the connections broke in step {self.boundary} ({self.reason})"
