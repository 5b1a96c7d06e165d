"""What torch's agent and the supervisor tell each other of a group of ranks: what starts, how it ends, and why.

The root cause is the first failure, except for a rank that has failed only because its connection to another one broke:
it may be seen first, since an exception takes its time to end a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttprun.protocol.meeting import Regroup


@dataclass(frozen=True)
class Verdict:
    """What the supervisor reports to torch's agent when a group has come to its end.

    kind          "done", "restart", "fail"; "resize": the group starts again on other nodes; "leave": without this one
    reason        a sentence; empty for "done"
    has_progress  False: the same fault came back, the scheduler should not requeue
    regroup       the order to take part in the next group, with "resize"
    reason_kind   of the reason, see protocol/reasons.py; "": none
    first         the reason alone, without what became of the job's state
    """

    kind: str
    reason: str = ""
    has_progress: bool = True
    regroup: Regroup | None = None
    reason_kind: str = ""
    first: str = ""


_OF_A_PEER = re.compile(r"connection (was lost|closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How one rank has failed.

    exit_code   negative: the signal that has ended it
    reason      in a phrase; "" if it is not known
    traceback   of the exception or the crash, "" if there is none or it has been shown
    """

    rank: int
    pid: int
    exit_code: int
    reason: str = ""
    traceback: str = ""

    @property
    def is_collateral(self) -> bool:
        """It looks like the consequence of another rank's failure."""
        return bool(_OF_A_PEER.search(self.reason))

    def as_torch_reports_it(self, local_rank: int, error_file: str) -> ProcessFailure:
        """For torch's summary; the traceback goes into the rank's error file, unless `record` has written one."""
        if self.traceback and not os.path.exists(error_file):
            extra = {"py_callstack": self.traceback, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError), open(error_file, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": self.reason, "extraInfo": extra}}, file)
        return ProcessFailure(local_rank, self.pid, self.exit_code, error_file)


class FirstFailure:
    """Keeps the root cause of what a group suffers now.

    found   None while nothing has failed
    """

    def __init__(self) -> None:
        self.found: Failure | None = None

    def note(self, failure: Failure, is_new_incident: bool) -> None:
        """A rank has failed; an incident that is over is no cause of a new one.

        is_new_incident   no incident is open: what was noted before is over
        """
        if self.found is None or is_new_incident or (self.found.is_collateral and not failure.is_collateral):
            self.found = failure

    @property
    def is_of_script(self) -> bool:
        """The script itself has ended a rank, by an exception or with an exit code."""
        return self.found is not None and self.found.exit_code > 0 and not self.found.is_collateral

    def forget(self) -> None:
        """What has failed is repaired: how the job ends does not follow from it."""
        self.found = None
