"""What other commands ask of a running job, by the control socket (`control.py`). Begin with `Requests.answer`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, assert_never

from ttprun import recovery
from ttprun.agent.checkpoints import Checkpoints
from ttprun.agent.node import Node
from ttprun.agent.repairs import Repairs
from ttprun.agent.standing import Standing
from ttprun.chaos.faults import parse_fault
from ttprun.chaos.injections import Injections
from ttprun.protocol.requests import InjectFault, Recall, Request, SaveNow


@dataclass
class Requests:
    """Answers requests."""

    node: Node
    checkpoints: Checkpoints
    injections: Injections
    repairs: Repairs
    standing: Standing

    def answer(self, request: Request) -> dict[str, Any]:
        """The reply to a request: {"ok": True, ...} or {"ok": False, "error": one line}."""
        match request:
            case InjectFault(fault=fault):
                return self._inject_fault(fault)
            case SaveNow():
                return self._checkpoint_now()
            case Recall():
                return self._call_back()
            case _:
                assert_never(request)

    def _inject_fault(self, fault: str) -> dict[str, Any]:
        if not self.node.config.allow_faults:
            return {"ok": False, "error": "this run was started without --allow-faults"}
        if self.node.verdict is not None:
            return {"ok": False, "error": "the run has ended"}
        return {"ok": True, "message": self.injections.order(parse_fault(fault), "inject-fault")}

    def _checkpoint_now(self) -> dict[str, Any]:
        """The reply says as "after" which checkpoint was tried last; the one that is asked for has a higher number."""
        node, job = self.node, self.node.job
        if node.verdict is not None:
            why_not = "the run has ended"
        elif node.is_broken:
            why_not = "ttprun's supervisor has failed: the job runs as under torchrun"
        elif node.config.mindio:
            why_not = "the framework writes its own checkpoints (--mindio)"
        elif job.phase is not recovery.Phase.RUNNING:
            why_not = f"the job is {job.phase}; ask again"
        else:
            why_not = recovery.why_not_saved(job)
        if why_not:
            return {"ok": False, "error": why_not}
        number = 0 if self.checkpoints.status is None else self.checkpoints.status.number
        self.standing.ask(lambda: node.advance(recovery.CheckpointAsked(at_s=time.monotonic())), is_end=False)
        return {"ok": True, "message": "", "after": number}

    def _call_back(self) -> dict[str, Any]:
        """Have the ranks that are away train again."""
        ranks = ", ".join(map(str, self.node.job.away))
        if self.node.verdict is not None:
            return {"ok": False, "error": "the run has ended"}
        why_not = self.repairs.call_back("ttprun recall")
        return {"ok": False, "error": why_not} if why_not else {"ok": True, "message": f"rank {ranks} called back"}
