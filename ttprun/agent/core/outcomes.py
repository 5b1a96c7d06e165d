"""What several parts conclude in the same way: a rank has failed, differs, is not understood, or a node is given up."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping

from ttprun.agent.core.failures import Failure
from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.launcher.verdict import Verdict
from ttprun.protocol.from_rank import ScriptError
from ttprun.protocol.rank_events import MismatchFound, RankExited

logger = logging.getLogger("ttprun")


def note_failure(node: Node, failure: Failure | RankExited) -> None:
    """A rank has failed: the root cause of what the group suffers, if nothing has before it."""
    if isinstance(failure, RankExited):
        failure = Failure(failure.rank, failure.pid, failure.exit_code, failure.reason, failure.traceback)
    node.first_failure.note(failure, is_new_incident=node.job.incident is None)


def note_script_error(node: Node, slot: RankSlot, message: ScriptError) -> None:
    """An exception ends a script; before the first step its traceback is printed here, once."""
    if message.traceback and not any(other.script_error for other in node.slots):
        with contextlib.suppress(OSError):  # whoever read it has gone
            os.write(2, message.traceback.encode(errors="backslashreplace"))
    slot.note_error(message)
    node.log("script_error", rank=slot.rank, error=message.error, traceback=message.detail)


def log_exit(node: Node, event: RankExited, where: Mapping[str, int]) -> None:
    """A rank's process has ended; `where`: {"node": number} if that is on another node."""
    fields = {"code": event.code, "signal": event.signal, "boundary": event.boundary, "reason": event.reason}
    node.log("rank_exited", rank=event.rank, pid=event.pid, **where, **fields, at_s=event.at_s)


def report_mismatch(node: Node, rank: int, generation: int, reason: str) -> None:
    """A rank is not what it should be: it cannot be repaired in this way.

    rank         global
    generation   in which that was found; of an older one it counts no more
    reason       which check has failed, and the two values
    """
    node.report(MismatchFound(at_s=time.monotonic(), rank=rank, generation=generation, reason=reason))


def refuse(node: Node, rank: int, reason: str) -> None:
    """A rank has sent what is no message, which has no effect: what should have come instead has its deadline."""
    node.log("message_refused", rank=rank, reason=reason)
    logger.warning("a message of rank %d is ignored: %s", rank, reason)


def give_up(node: Node, reason: str, kind: str = "fail", is_new_incident: bool = True) -> None:
    """This node's ranks end, for a reason that lies with none of them.

    kind   of the verdict
    """
    failure = Failure(node.here[0].rank, 0, -signal.SIGTERM, reason)
    node.first_failure.note(failure, is_new_incident)
    node.conclude(Verdict(kind, reason))
