"""What other commands ask of a running job (`control_socket.py`). Begin with `Requests.answer`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import assert_never

from ttprun import recovery
from ttprun.agent.checkpoints.quiesce_schedule import QuiesceSchedule
from ttprun.agent.checkpoints.writer import CheckpointWriter
from ttprun.agent.core.node import Node
from ttprun.agent.health import stack_reports
from ttprun.agent.repair.repairs import Repairs
from ttprun.chaos.faults import parse_fault
from ttprun.errors import in_short
from ttprun.protocol.control_requests import (
    Accepted,
    InjectFault,
    Recall,
    Rejected,
    Reply,
    Request,
    SaveNow,
    TakeStacks,
)


@dataclass
class Requests:
    """Answers requests."""

    node: Node
    checkpoint_writer: CheckpointWriter
    repairs: Repairs
    quiesce_schedule: QuiesceSchedule
    stack_reports: int = 0

    def answer(self, request: Request) -> Reply:
        """The reply to a request. Raises ValueError if it cannot be carried out."""
        match request:
            case InjectFault(fault=fault):
                return self._inject_fault(fault)
            case SaveNow():
                return self._checkpoint_now()
            case Recall():
                return self._call_back()
            case TakeStacks():
                return self._take_stacks()
            case _:
                assert_never(request)

    def _inject_fault(self, fault: str) -> Reply:
        if not self.node.config.allow_faults:
            return Rejected("this run was started without --allow-faults")
        if self.node.verdict is not None:
            return Rejected("the run has ended")
        return Accepted(self.node.role.inject(parse_fault(fault)))

    def _checkpoint_now(self) -> Reply:
        """Have a checkpoint written, at a boundary from which a run can resume if one comes soon."""
        node, job = self.node, self.node.job
        if node.verdict is not None:
            why_not = "the run has ended"
        elif node.role.asked_elsewhere:
            why_not = f"ask on {node.role.asked_elsewhere}, whose agent leads"
        elif node.is_broken:
            why_not = "ttprun's supervisor has failed: the job runs as under torchrun"
        elif node.config.mindio:
            why_not = "the framework writes its own checkpoints (--mindio)"
        elif job.phase is not recovery.JobPhase.RUNNING:
            why_not = f"the job is {job.phase}; ask again"
        else:
            why_not = recovery.why_not_saved(job)
        if why_not:
            return Rejected(why_not)
        number = 0 if self.checkpoint_writer.status is None else self.checkpoint_writer.status.number
        self.quiesce_schedule.ask(lambda: node.advance(recovery.CheckpointAsked(at_s=time.monotonic())), is_end=False)
        return Accepted(after=number)

    def _take_stacks(self) -> Reply:
        """Have the stacks of this node's ranks written."""
        if self.node.verdict is not None:
            return Rejected("the run has ended")
        before = self.stack_reports
        self.stack_reports += 1
        stack_reports.write_when_taken(self.node, self.stack_reports)
        elsewhere = [slot.rank for slot in self.node.slots if not slot.is_here]
        what = f"ranks {in_short(list(map(str, elsewhere)))} are on other nodes: ask there" if elsewhere else ""
        return Accepted(what, after=before)

    def _call_back(self) -> Reply:
        """Have the ranks that are away train again."""
        ranks = ", ".join(map(str, self.node.job.away))
        if self.node.verdict is not None:
            return Rejected("the run has ended")
        why_not = self.repairs.call_back("ttprun recall")
        return Rejected(why_not) if why_not else Accepted(f"rank {ranks} called back")
