"""The incident: one fault and what follows from it, for the operator and the event log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ttprun.protocol.reason import Reason

Rung = Literal["reconnect", "rerun", "replace", "rewind", "resize", "restart", "fail"]
Outcome = Literal["open", "recovered", "restarted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is known about an incident so far. Durations of phases that it has not reached are None.

    Those from `freeze_s` to `reissue_s` are of the last attempt; `spawn_s` is the slowest start of all attempts.

    id            1 for the job's first incident; 0: not an incident, a new launch resumes from a checkpoint ("resume")
    kind          of the first fault: "signal 9", "exit 3", "exception", "hang", "connection", "mismatch", a fault of a
                  device; "planned": healthy ranks are to be replaced; "upgrade": ranks that were away are called
                  back; "checkpoint": resuming from one has failed; "resume": see `id`
    ranks         lost ranks, in the order of their loss, each once; or the rank that found a mismatch
    rung          the way out that is tried: reconnect, run the script again in the same processes, replace the ranks,
                  rewind to a snapshot, resize to fewer ranks (or to all of them again), restart the group, or fail
    outcome       "open" until it has ended
    reason        the faults, a sentence; after a fallback, why it was taken and then the faults
    phase         phase of the job when this was written
    generation    of the job when this was written
    attempt       1 .. max_attempts
    boundary      of the survivors; None before they have agreed
    steps_lost    optimizer steps that all must run again; None if unknown
    opened_at_s   when the agent saw the first fault
    detect_s      from the first death until the agent saw it
    freeze_s      until the last survivor was quiesced
    spawn_s       from the request for a process to its start, also while survivors are quiesced (`freeze_s`)
    had_standby  all new processes came from standbys; None: none was needed, or it is not known
    replay_s      from there, or from the last replacement's start if that was later, until the last one had replayed
    transfer_s    until the last replacement had its state
    rebuild_s     until all ranks were connected
    reissue_s     from there until all journals were issued again
    total_s       from the first death to the end of the incident
    """

    id: int
    kind: str
    ranks: tuple[int, ...]
    rung: Rung
    outcome: Outcome
    reason: Reason
    phase: str
    generation: int
    opened_at_s: float
    attempt: int = 1
    boundary: int | None = None
    steps_lost: int | None = None
    detect_s: float | None = None
    freeze_s: float | None = None
    spawn_s: float | None = None
    had_standby: bool | None = None
    replay_s: float | None = None
    transfer_s: float | None = None
    rebuild_s: float | None = None
    reissue_s: float | None = None
    total_s: float | None = None
