"""What to do when a rank is lost: the pure decision logic. No clock, no input or output, no torch.

    job = new_job(Settings(world_size=4))
    job, actions = advance(job, RankStarted(rank=0, pid=4711, at_s=0.1))

Files, lowest floor first: `frozen`, `shards`, `leader_events`, `fault_events`, `incident`, `leader_orders` (data);
events that other nodes report, too, are in `ttprun.protocol.rank_events`;
`members` (the ranks, and counts of them), `job`, `machine_errors`;
`phases` (how phases and incidents begin and end), `ways_back`, `ladder` (ways out of an incident);
`repair`, `resize`, `leaving`, `losses`, `hung`, `planned`, `regroup`, `persist`, `renewal` (handlers);
`alone` (ranks that are jobs of their own); `machine` (the table).
Apart from these are `hangs` (which rank hangs), `cost` (what a loss would cost), `replicas` (which rank has diverged),
`membership_policy` (which nodes train) and `next_leader` (the job in the hands of another agent). Read TRANSITIONS in
`machine` first.
"""

from ttprun.recovery.alone import is_alone
from ttprun.recovery.cost import cost_of_a_loss, cost_of_a_loss_alone
from ttprun.recovery.fault_events import ConnectionBroken, NodeLost, RankDiverged, RankHung
from ttprun.recovery.hung import has_hung_before, is_last_survivor, who_is_awaited
from ttprun.recovery.incident import Incident
from ttprun.recovery.job import RUNGS, Job, JobPhase, PhaseLimits, Settings, new_job
from ttprun.recovery.ladder import may_persist, why_not_saved
from ttprun.recovery.leader_events import (
    CheckpointAsked,
    DeadlinePassed,
    DowngradeAsked,
    ElasticDeclared,
    GroupResized,
    GroupRestarted,
    RanksCompared,
    ReplacementAsked,
    ResizeAsked,
    ResumeAsked,
    Saved,
    SnapshotTaken,
    StatePersisted,
    SupervisorRenewed,
    UpgradeAsked,
)
from ttprun.recovery.leader_orders import (
    FailJob,
    FinishJob,
    GiveUpCheckpoint,
    GiveUpResize,
    NoteUnusable,
    Persist,
    RecordIncident,
    Regroup,
    RestartGroup,
    SetDeadline,
)
from ttprun.recovery.losses import is_of_script
from ttprun.recovery.machine import TRANSITIONS, advance
from ttprun.recovery.machine_errors import ForbiddenTransition, MachineError, MissingTransition, UnexpectedStart
from ttprun.recovery.members import Life
from ttprun.recovery.next_leader import known_of, succeed
from ttprun.recovery.planned import why_not_replaceable, why_not_upgradable
from ttprun.recovery.regroup import with_size
from ttprun.recovery.repair import missing_from
from ttprun.recovery.resize import groups_left, is_elastic, why_not_without
