"""What the loss of a rank would cost as the job stands now, for the operator to read before it happens."""

from __future__ import annotations

from ttprun.recovery.job import Job
from ttprun.recovery.ladder import may_persist, may_rewind


def cost_of_a_loss(job: Job) -> str:
    """A clause that goes on from "if a rank is lost, ", for a job no rank of which can be replaced."""
    if may_rewind(job):
        return f"all ranks go back to the snapshot of step {job.snapshot}, and the steps since then are lost"
    settings = job.settings
    is_limited = settings.max_restarts is not None
    if "restart" in settings.rungs and (not is_limited or job.restarts < (settings.max_restarts or 0)):
        return "all ranks start again from the top of the script, and what it has not saved itself is lost"
    if may_persist(job) and not job.hindrance:  # else no launch could go on from what is saved
        return "the job ends once its state is saved"
    return (
        "the job ends, and what the script has not saved itself is lost (with --max-restarts N all ranks would start "
        "again from its top)"
    )
