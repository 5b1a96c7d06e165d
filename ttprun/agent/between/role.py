"""What this node's agent is to those of the others: it leads, or follows the one that does.

On one node it leads. The two roles are in `ttprun.agent.between.roles`; which one it has is asked nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ttprun.chaos.faults import Fault
from ttprun.protocol import node_messages
from ttprun.protocol.rank_events import Event


class Role(ABC):
    """Where what happens on this node, or is asked for here, is decided.

    asked_elsewhere   the node on which a checkpoint has to be asked for; "": this one
    """

    asked_elsewhere = ""

    @abstractmethod
    def report(self, report: node_messages.Report) -> None:
        """Something has happened on this node, or was asked for here."""

    @abstractmethod
    def advance(self, event: Event) -> None:
        """Something is found out that the state machine has to answer."""

    @abstractmethod
    def take(self, number: int, message: Any) -> None:
        """The agent of another node has sent something."""

    @abstractmethod
    def lose(self, number: int, why: str) -> None:
        """The agent of another node is lost."""

    @abstractmethod
    def welcome(self, address: str) -> None:
        """A launcher waits for slots."""

    @abstractmethod
    def end_turn(self) -> None:
        """All that had come was taken: send and decide what was put off for more of the same."""

    @abstractmethod
    def look(self) -> None:
        """Time has passed."""

    @abstractmethod
    def inject(self, fault: Fault) -> str:
        """A fault is asked for; returns the answer for the user. Raises ValueError if it cannot be carried out."""
