"""The incident: one fault and all that follows from it, as the operator and the event log see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rung = Literal["reconnect", "rerun", "replace", "rewind", "resize", "restart", "fail"]
Outcome = Literal["open", "recovered", "restarted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is known about an incident so far. Durations are None where it did not come so far.

    Those from `freeze_s` to `reissue_s` are of the last attempt, but for `spawn_s`: the slowest start of all attempts.

    id            1 for the job's first incident; 0: it is none, a new launch goes on from a checkpoint (kind "resume")
    kind          of the first fault: "signal 9", "exit 3", "exception", "hang", "connection", "mismatch", a fault of a
                  device; "planned": healthy ranks were to be replaced; "upgrade": ranks that were away were called
                  back; "checkpoint": it could not be gone on from one; "resume": see `id`
    ranks         ranks that were lost, in the order of their loss, each once; or the rank that found a mismatch
    rung          the way out that is tried: connect anew, run the script again in the same processes, replace the
                  ranks, go back to a snapshot, train on with fewer ranks (or with all of them again), restart the
                  group, or end the job
    outcome       "open" until it has ended
    reason        the faults, a sentence; after a fallback, why it was taken and then the faults
    phase         phase of the job when this was written
    generation    of the job when this was written
    attempt       1 .. max_attempts
    boundary      at which the survivors stand; None before they have agreed
    steps_lost    optimizer steps that must be run again by all; None if not known
    opened_at_s   when the agent saw the first fault
    detect_s      from the first death to the agent's seeing it
    freeze_s      until the last survivor stood still
    spawn_s       from asking for a process to its start
    replay_s      until the last replacement had replayed
    transfer_s    until the last replacement had its state
    rebuild_s     until all ranks were connected
    reissue_s     from there until all journals were through
    total_s       from the first death to the end of the incident
    """

    id: int
    kind: str
    ranks: tuple[int, ...]
    rung: Rung
    outcome: Outcome
    reason: str
    phase: str
    generation: int
    opened_at_s: float
    attempt: int = 1
    boundary: int | None = None
    steps_lost: int | None = None
    detect_s: float | None = None
    freeze_s: float | None = None
    spawn_s: float | None = None
    replay_s: float | None = None
    transfer_s: float | None = None
    rebuild_s: float | None = None
    reissue_s: float | None = None
    total_s: float | None = None
