"""What to do when a rank is lost: the pure decision logic. No clock, no input or output, no torch.

    job = new_job(Settings(world_size=4))
    job, actions = advance(job, RankStarted(rank=0, pid=4711, at_s=0.1))

Files, lowest floor first: `events`, `incident`, `actions`, `job`, `errors` (data); `ladder` (ways out of an incident);
`repair`, `faults`, `hung` (handlers); `machine` (the table). Beside them stand `hangs` (which rank hangs) and
`replicas` (which rank has diverged). Read TRANSITIONS in `machine` first.
"""

from ttprun.recovery.actions import (
    Action,
    FailJob,
    FinishJob,
    Freeze,
    KillRank,
    RecordIncident,
    Replay,
    RestartGroup,
    Resume,
    SendState,
    SetDeadline,
    SpawnRank,
)
from ttprun.recovery.errors import ForbiddenTransition, MachineError, MissingTransition, UnexpectedStart
from ttprun.recovery.events import (
    ConnectionBroken,
    DeadlinePassed,
    Event,
    GroupRestarted,
    MismatchFound,
    RankDiverged,
    RankEvent,
    RankExited,
    RankFaulted,
    RankFrozen,
    RankHung,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    RankStarted,
    RankUnprotected,
    RepairEvent,
    StateSent,
    StopAsked,
)
from ttprun.recovery.incident import Incident
from ttprun.recovery.job import RUNGS, Job, Life, Limits, Member, Phase, Settings, new_job
from ttprun.recovery.machine import TRANSITIONS, advance

__all__ = [
    "RUNGS",
    "TRANSITIONS",
    "Action",
    "ConnectionBroken",
    "DeadlinePassed",
    "Event",
    "FailJob",
    "FinishJob",
    "ForbiddenTransition",
    "Freeze",
    "GroupRestarted",
    "Incident",
    "Job",
    "KillRank",
    "Life",
    "Limits",
    "MachineError",
    "Member",
    "MismatchFound",
    "MissingTransition",
    "Phase",
    "RankDiverged",
    "RankEvent",
    "RankExited",
    "RankFaulted",
    "RankFrozen",
    "RankHung",
    "RankProtected",
    "RankRebuilt",
    "RankReissued",
    "RankRepaired",
    "RankReplayed",
    "RankStarted",
    "RankUnprotected",
    "RecordIncident",
    "RepairEvent",
    "Replay",
    "RestartGroup",
    "Resume",
    "SendState",
    "SetDeadline",
    "Settings",
    "SpawnRank",
    "StateSent",
    "StopAsked",
    "UnexpectedStart",
    "advance",
    "new_job",
]
