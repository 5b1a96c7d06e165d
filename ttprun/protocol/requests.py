"""What other commands ask of a running job by its control socket, beside the token of the run: one class a request.

Begin with `agent/requests.py`, where they are answered.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InjectFault:
    """Cause a fault, as `chaos.faults.parse_fault` reads it."""

    fault: str


@dataclass(frozen=True)
class SaveNow:
    """Write a checkpoint."""


@dataclass(frozen=True)
class Recall:
    """Have the ranks that are away train again."""


Request = InjectFault | SaveNow | Recall
