"""What several parts conclude in the same way: a rank has failed, differs, or this node is given up."""

from __future__ import annotations

import signal
import time

from ttprun.agent.core.failures import Failure
from ttprun.agent.core.node import Node
from ttprun.agent.launcher.verdict import Verdict
from ttprun.protocol.events import MismatchFound, RankExited


def note_failure(node: Node, failure: Failure) -> None:
    """A rank has failed: the root cause of what the group suffers, if nothing has before it."""
    node.first_failure.note(failure, is_new_incident=node.job.incident is None)


def log_exit(node: Node, event: RankExited, number: int | None = None) -> None:
    """A rank's process has ended, on this node or another one of that number."""
    where = {} if number is None else {"node": number}
    fields = {"code": event.code, "signal": event.signal, "boundary": event.boundary, "reason": event.reason}
    node.log("rank_exited", rank=event.rank, pid=event.pid, **where, **fields, at_s=event.at_s)


def report_mismatch(node: Node, rank: int, generation: int, reason: str) -> None:
    """A rank is not what it should be: it cannot be repaired in this way.

    rank         global
    generation   in which that was found; of an older one it counts no more
    reason       which check has failed, and the two values
    """
    node.advance(MismatchFound(at_s=time.monotonic(), rank=rank, generation=generation, reason=reason))


def give_up(node: Node, reason: str, kind: str = "fail", is_new_incident: bool = True) -> None:
    """This node's ranks end, for a reason that lies with none of them.

    kind   of the verdict
    """
    failure = Failure(node.here[0].rank, 0, -signal.SIGTERM, reason)
    node.first_failure.note(failure, is_new_incident)
    node.conclude(Verdict(kind, reason))
