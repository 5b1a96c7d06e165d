"""Events that are reported by a command (`--on-event`). Nothing is imported here but typing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal[
    "incident_opened",
    "incident_ended",
    "run_ended",
    "launcher_died",
    "stalled",
    "straggler",
    "nan_found",
    "node_lost",
    "node_replaced",
    "checkpoint_written",
    "checkpoint_failed",
    "rank_unprotected",
    "replicas_diverged",
    "supervisor_failed",
]
USUAL: tuple[Kind, ...] = (
    "incident_ended",
    "run_ended",
    "launcher_died",
    "stalled",
    "nan_found",
    "node_lost",
    "checkpoint_failed",
    "replicas_diverged",
    "supervisor_failed",
)


class Namer:
    """Gives events their kinds: an incident is logged at each of its phases, and reported when it begins and ends."""

    def __init__(self) -> None:
        self._opened: set[object] = set()

    def kind_of(self, event: Mapping[str, Any]) -> str:
        """The kind of an event; "" for a phase in between."""
        if event["event"] != "incident":
            return str(event["event"])
        if event["outcome"] != "open":
            return "incident_ended"
        is_new = event["id"] not in self._opened
        self._opened.add(event["id"])
        return "incident_opened" if is_new else ""
