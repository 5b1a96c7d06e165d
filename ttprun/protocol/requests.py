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


@dataclass(frozen=True)
class TakeStacks:
    """Write the Python stacks of this node's ranks to the run's `stacks.json`."""


Request = InjectFault | SaveNow | Recall | TakeStacks


@dataclass(frozen=True)
class Accepted:
    """The request is carried out.

    message   what is done, for people
    after     of SaveNow, TakeStacks: number of the checkpoint, or report, before; the requested one has a higher one
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
