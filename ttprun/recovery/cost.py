"""What the loss of a rank would cost now, for the operator to read before it happens."""

from __future__ import annotations

from ttprun.recovery.alone import as_own
from ttprun.recovery.job import Job
from ttprun.recovery.ladder import may_persist
from ttprun.recovery.ways_back import may_rewind


def cost_of_a_loss(job: Job) -> str:
    """Completes "if a rank is lost, ", for a job whose ranks cannot be replaced."""
    if may_rewind(job):
        return f"all ranks go back to the snapshot of step {job.snapshot}, and the steps since then are lost"
    settings = job.settings
    is_limited = settings.max_restarts is not None
    if "restart" in settings.rungs and (not is_limited or job.restarts < (settings.max_restarts or 0)):
        return "all ranks start again from the top of the script, and what it has not saved itself is lost"
    # Else no launch could resume from what is saved: no replay reaches it, or the lost rank's own part is missing.
    if may_persist(job) and not job.hindrance and not job.replicas.needs_snapshots:
        return "the job ends once its state is saved"
    return (
        "the job ends, and what the script has not saved itself is lost (with --max-restarts N all ranks would start "
        "again from its top)"
    )


def cost_of_a_loss_alone(job: Job, rank: int, every_s: float | None, kept: int | None = None) -> str:
    """Completes "if rank 1 is lost, ", for a rank that is alone.

    every_s  seconds between two states that it keeps of itself; 0: it keeps one after each step; None: it keeps none
    kept     boundary of one that it has kept before
    """
    if every_s is None and kept:
        return f"it alone goes back to its step {kept}, and its steps since are lost"
    if every_s is None:
        if job.settings.world_size == 1:
            return f"it goes back to its snapshot of step {job.snapshot}" if may_rewind(job) else cost_of_a_loss(job)
        has_joined = as_own(job, rank).members[rank].has_joined
        may_begin_anew = "rewind" in job.settings.rungs and not has_joined
        return "it alone begins anew, and its steps are lost" if may_begin_anew else cost_of_a_loss(job)
    if every_s:
        return f"it alone goes back to the newest such state, one every {every_s:.1f} s, and loses its steps since"
    return "it alone is replaced, and loses no step: it keeps one after each"
