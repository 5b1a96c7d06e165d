"""What to do when a rank is lost: the pure decision logic. No clock, no input or output, no torch.

    job = new_job(Settings(world_size=4))
    job, actions = advance(job, RankStarted(rank=0, pid=4711, at_s=0.1))

Files, lowest floor first: `frozen`, `shards`, `event`, `events`, `fault_events`, `incident`, `actions` (data);
`members` (the ranks, and counts of them), `job`, `errors`;
`phases` (how phases and incidents begin and end), `ladder` (ways out of an incident); `repair`, `resize`, `faults`,
`hung`, `planned`, `persist` (handlers); `alone` (ranks that are jobs of their own); `machine` (the table). Apart from
these are `hangs` (which rank hangs), `cost` (what a loss would cost) and `replicas` (which rank has diverged). Read
TRANSITIONS in `machine` first.
"""

from ttprun.recovery.actions import (
    Action,
    FailJob,
    FinishJob,
    Freeze,
    GiveUpCheckpoint,
    KillRank,
    LoadMirror,
    LoadState,
    NoteUnusable,
    Persist,
    RecordIncident,
    Replay,
    RestartGroup,
    Resume,
    Rewind,
    SendState,
    SetDeadline,
    SpawnRank,
)
from ttprun.recovery.alone import is_alone
from ttprun.recovery.cost import cost_of_a_loss, cost_of_a_loss_alone
from ttprun.recovery.errors import ForbiddenTransition, MachineError, MissingTransition, UnexpectedStart
from ttprun.recovery.event import Event, RankEvent, RepairEvent
from ttprun.recovery.events import (
    CheckpointAsked,
    DeadlinePassed,
    DowngradeAsked,
    ElasticDeclared,
    GroupRestarted,
    MismatchFound,
    RankFrozen,
    RankHindered,
    RankJoined,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    RanksCompared,
    RankStarted,
    RankTrainsAlone,
    RankUnprotected,
    ReplacementAsked,
    ResumeAsked,
    Saved,
    SnapshotTaken,
    SpawnFailed,
    StatePersisted,
    StateSent,
    StopAsked,
    UpgradeAsked,
)
from ttprun.recovery.fault_events import (
    ConnectionBroken,
    NodeLost,
    RankDiverged,
    RankExited,
    RankFaulted,
    RankHung,
)
from ttprun.recovery.incident import Incident
from ttprun.recovery.job import RUNGS, Job, Limits, Phase, Settings, new_job
from ttprun.recovery.ladder import may_persist, why_not_saved
from ttprun.recovery.machine import TRANSITIONS, advance
from ttprun.recovery.members import Life, Member
from ttprun.recovery.planned import why_not_replaceable, why_not_upgradable
from ttprun.recovery.resize import groups_left, is_elastic, why_not_without

__all__ = [
    "RUNGS",
    "TRANSITIONS",
    "Action",
    "CheckpointAsked",
    "ConnectionBroken",
    "DeadlinePassed",
    "DowngradeAsked",
    "ElasticDeclared",
    "Event",
    "FailJob",
    "FinishJob",
    "ForbiddenTransition",
    "Freeze",
    "GiveUpCheckpoint",
    "GroupRestarted",
    "Incident",
    "Job",
    "KillRank",
    "Life",
    "Limits",
    "LoadMirror",
    "LoadState",
    "MachineError",
    "Member",
    "MismatchFound",
    "MissingTransition",
    "NodeLost",
    "NoteUnusable",
    "Persist",
    "Phase",
    "RankDiverged",
    "RankEvent",
    "RankExited",
    "RankFaulted",
    "RankFrozen",
    "RankHindered",
    "RankHung",
    "RankJoined",
    "RankProtected",
    "RankRebuilt",
    "RankReissued",
    "RankRepaired",
    "RankReplayed",
    "RankStarted",
    "RankTrainsAlone",
    "RankUnprotected",
    "RanksCompared",
    "RecordIncident",
    "RepairEvent",
    "ReplacementAsked",
    "Replay",
    "RestartGroup",
    "Resume",
    "ResumeAsked",
    "Rewind",
    "Saved",
    "SendState",
    "SetDeadline",
    "Settings",
    "SnapshotTaken",
    "SpawnFailed",
    "SpawnRank",
    "StatePersisted",
    "StateSent",
    "StopAsked",
    "UnexpectedStart",
    "UpgradeAsked",
    "advance",
    "cost_of_a_loss",
    "cost_of_a_loss_alone",
    "groups_left",
    "is_alone",
    "is_elastic",
    "may_persist",
    "new_job",
    "why_not_replaceable",
    "why_not_saved",
    "why_not_upgradable",
    "why_not_without",
]
