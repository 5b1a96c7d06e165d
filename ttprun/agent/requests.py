"""What other commands of ttprun ask of a running job, by the control socket (`control.py`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, assert_never

from ttprun import recovery
from ttprun.chaos.faults import parse_fault
from ttprun.protocol.requests import InjectFault, Recall, Request, SaveNow

if TYPE_CHECKING:
    from ttprun.agent.supervisor import Supervisor


def answer(supervisor: Supervisor, request: Request) -> dict[str, Any]:
    """The reply to a request: {"ok": True, ...} or {"ok": False, "error": one line}."""
    match request:
        case InjectFault(fault=fault):
            return _inject_fault(supervisor, fault)
        case SaveNow():
            return _checkpoint_now(supervisor)
        case Recall():
            return _call_back(supervisor)
        case _:
            assert_never(request)


def _inject_fault(supervisor: Supervisor, fault: str) -> dict[str, Any]:
    if not supervisor.config.allow_faults:
        return {"ok": False, "error": "this run was started without --allow-faults"}
    if supervisor.verdict is not None:
        return {"ok": False, "error": "the run has ended"}
    return {"ok": True, "message": supervisor.injections.order(parse_fault(fault), "inject-fault")}


def _checkpoint_now(supervisor: Supervisor) -> dict[str, Any]:
    """The reply's "after" is the number of the checkpoint that was tried last; the one asked for has a higher one."""
    job = supervisor.job
    if supervisor.verdict is not None:
        why_not = "the run has ended"
    elif supervisor.is_broken:
        why_not = "ttprun's supervisor has failed: the job runs as under torchrun"
    elif supervisor.config.mindio:
        why_not = "the framework writes its own checkpoints (--mindio)"
    elif job.phase is not recovery.Phase.RUNNING:
        why_not = f"the job is {job.phase}; ask again"
    else:
        why_not = recovery.why_not_saved(job)
    if why_not:
        return {"ok": False, "error": why_not}
    number = 0 if supervisor.checkpoints.status is None else supervisor.checkpoints.status.number
    supervisor.standing.ask(lambda: supervisor.advance(recovery.CheckpointAsked(at_s=time.monotonic())), is_end=False)
    return {"ok": True, "message": "", "after": number}


def _call_back(supervisor: Supervisor) -> dict[str, Any]:
    """Have the ranks that are away train again."""
    ranks = ", ".join(map(str, supervisor.job.away))
    if supervisor.verdict is not None:
        return {"ok": False, "error": "the run has ended"}
    why_not = supervisor.repairs.call_back("ttprun recall")
    return {"ok": False, "error": why_not} if why_not else {"ok": True, "message": f"rank {ranks} called back"}
