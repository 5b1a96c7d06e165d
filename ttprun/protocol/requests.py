"""Requests of other commands to a running job by its control socket, sent with the run's token: one class per request.

`agent/core/requests.py` answers them.
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
    """Let the ranks that are away train again."""


Request = InjectFault | SaveNow | Recall


@dataclass(frozen=True)
class Accepted:
    """The request is carried out.

    message   what is done, for people
    after     of SaveNow: number of the checkpoint that was tried last; the requested one has a higher number
    """

    message: str = ""
    after: int = 0


@dataclass(frozen=True)
class Rejected:
    """Nothing is done.

    error   why, in one line
    """

    error: str


Reply = Accepted | Rejected
