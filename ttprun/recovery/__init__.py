"""What to do when a rank is lost: the pure decision logic. No clock, no input or output, no torch.

    job = new_job(Settings(world_size=4))
    job, actions = advance(job, RankStarted(rank=0, pid=4711, at_s=0.1))

A new kind of fault: see `job_events`. Files, lowest floor first: `shards`, `replicas` (which ranks hold the same, and
which has diverged), `job_events`, `members` (the ranks, and counts of them), `job`; events that other nodes report are
in `ttprun.protocol.rank_events`;
`state_origins` (where ranks get their state from);
`phases` (how phases and incidents begin and end, orders, ways back), `ladder` (ways out of an incident);
`repair`, `on_leave`, `on_loss`, `on_hang`, `on_request` (handlers);
`alone` (ranks that are jobs of their own); `machine` (the table).
Apart from these are `hangs` (which rank hangs, from `hang_observations`) and `elastic_policy` (which nodes train). Read
TRANSITIONS in `machine` first.
"""

from ttprun.recovery.alone import is_alone
from ttprun.recovery.elastic_policy import may_lead
from ttprun.recovery.job import RUNGS, Incident, Job, JobPhase, PhaseLimits, Settings, known_of, new_job, succeed
from ttprun.recovery.job_events import (
    CheckpointAsked,
    ConnectionBroken,
    DeadlinePassed,
    DowngradeAsked,
    ElasticDeclared,
    GroupResized,
    GroupRestarted,
    NodeLost,
    RankDiverged,
    RankHung,
    RanksCompared,
    ReplacementAsked,
    ResizeAsked,
    ResumeAsked,
    Saved,
    SnapshotTaken,
    StatePersisted,
    StepDiffers,
    SupervisorRenewed,
    UpgradeAsked,
)
from ttprun.recovery.ladder import cost_of_a_loss, cost_of_a_loss_alone, why_not_saved
from ttprun.recovery.machine import TRANSITIONS, advance
from ttprun.recovery.members import RankState
from ttprun.recovery.on_hang import has_hung_before, is_last_survivor, who_is_awaited
from ttprun.recovery.on_leave import groups_left, is_elastic, why_not_without
from ttprun.recovery.on_loss import is_of_script
from ttprun.recovery.on_request import why_not_replaceable, why_not_upgradable, with_size
from ttprun.recovery.phases import (
    FailJob,
    FinishJob,
    ForbiddenTransition,
    GiveUpCheckpoint,
    GiveUpResize,
    LetNodeGo,
    MachineError,
    MissingTransition,
    NoteUnusable,
    Persist,
    RecordIncident,
    Regroup,
    RestartGroup,
    SetDeadline,
    UnexpectedStart,
)
from ttprun.recovery.repair import missing_from
