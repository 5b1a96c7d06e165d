"""The end of a group of ranks, as the supervisor reports it to torch's agent."""

from __future__ import annotations

from dataclasses import dataclass

from ttprun.protocol.meeting import Regroup


@dataclass(frozen=True)
class Verdict:
    """What the supervisor reports to torch's agent when a group has come to its end.

    kind          "done", "restart", "fail"; "resize": the group starts again on other nodes; "leave": without this one
    reason        a sentence; empty for "done"
    has_progress  False: the same fault came back, the scheduler should not requeue
    regroup       the order to take part in the next group, with "resize"
    """

    kind: str
    reason: str = ""
    has_progress: bool = True
    regroup: Regroup | None = None
