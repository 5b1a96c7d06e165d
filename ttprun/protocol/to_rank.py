"""What the agent sends to a rank: one class per message.

A rank handles them in `rank/replay/order_thread.py`, with --mindio in `mindio/callback_recovery.py`, and
before it has imported torch in `rank/bootstrap/presence.py`. Two more come from other ranks, and are forwarded
unchanged: `from_rank.Put` and `from_rank.RankUnprotected`. Words and units are as in `from_rank.py`; messages
only for a framework with callbacks are in `mindio.py`.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from ttprun.protocol import from_rank, standby_messages
from ttprun.protocol.codec import AtBoundary, Message, OfGeneration
from ttprun.protocol.mindio import Strategy
from ttprun.protocol.process_orders import Action, ForRank, ForRanks
from ttprun.protocol.snapshot_messages import MirroredShare

# The beginning, and the end.


class Options(Message, frozen=True):
    """The part of the configuration that a rank needs; names in `config.py` mean the same.

    keeps_state           all ranks may have to resume from their records
    mirror                paths of its mirror: the slots, and for results; empty: it keeps none
    mirror_copies         paths where it keeps the mirror of a rank of the node before, a slot each; empty: nowhere
    mirror_copies_bytes   that all copies of this node may take together
    own_state             paths of the two slots where a rank that is alone keeps its state, and of two for records
    buffers               for each place of a snapshot, paths for this rank's records and for its share
    snapshot_every_steps  0: when the agent requests one
    overhead_budget       share of a step that protection may take; 0: all of it
    nan_limit_s           how long a NaN in its own gradient blocks a rank's step; None: it is only reported
    is_replaced           a lost rank gets a new process
    may_rerun             the script may be run again in the same process
    is_strict             a variable that could not be restored refuses a replay, also without a contradiction
    prints_traceback      stderr goes to a file of the rank's own
    trace                 file to which it adds digests of each step; "": it leaves none
    verified              path for what the collectives of a step have given to it, if its steps are verified; "": not
    keeps_nan             the step in which a NaN is found is kept
    verified_every        boundaries after which the next rank's step is verified, from what it alone keeps; 0: after
                          snapshots of all
    verified_before       and waits before it takes such a step until that is compared
    """

    allow_faults: bool
    keeps_state: bool
    mirror: list[str]
    mirror_copies: list[str]
    mirror_copies_bytes: int
    own_state: list[str]
    buffers: list[tuple[str, str]]
    snapshot_every_steps: int
    record_limit_mib: int
    journal_limit_mib: int
    commit_timeout_s: float
    is_replaced: bool
    verify_every: int
    overhead_budget: float
    nan_limit_s: float | None
    user_paths: list[str]
    follow: list[str]
    loops: list[str] | None
    may_rerun: bool
    retry_on: list[str]
    device_errors: dict[str, Any]
    mindio: bool
    is_strict: bool
    prints_traceback: bool
    trace: str = ""
    verified: str = ""
    verified_every: int = 0
    verified_before: bool = False
    keep_steps: int = 0
    keeps_nan: bool = False
    keep_steps_mib: int = 0


class InjectedFault(Message, frozen=True):
    """An injected fault for this rank; the agent may send the same number twice.

    fault   as `chaos.injected_faults.parse_fault` reads it
    """

    number: int
    fault: str


class Welcome(Message, frozen=True):
    """The first message to a process: its identity. With it come the descriptors of board, recorder and stack file.

    On several nodes that of the recorder for another rank's records follows; to a standby, then those of its outputs.

    is_replacement  the process replaces a lost one, and waits for `Replay` or `Resume` before it runs the script
    address         of this node for connections of the ranks; "": all ranks are on one node
    had_torch       the replaced process had imported torch
    arguments       Python's arguments: [script, ...] or ["-m", module, ...]; empty if the rank does not run Python
    faults          injected ones for this rank
    env             environment, for a standby that becomes a rank
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    generation: int
    run_dir: str
    is_replacement: bool
    options: Options
    address: str = ""
    had_torch: bool = False
    arguments: list[str] = field(default_factory=list)
    faults: list[InjectedFault] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def descriptors(self) -> int:
        """How many come with it, without those of outputs."""
        return 4 if self.address else 3


class Heard(Message, frozen=True):
    """The agent has received `RankFaulted`: its later messages are meant for the next run of the script."""


class EndAsked(Message, frozen=True):
    """The process has been sent a signal that ends it."""


class FaultDone(Message, frozen=True):
    """The agent has done its part of an injected fault."""


# In training.


class NotAlike(Message, frozen=True):
    """Parameters that differ between ranks.

    owners  key of each -> by rank, the lowest rank that has always held the same
    """

    owners: dict[str, list[int]]


class KeepMirror(Message, frozen=True):
    """No other rank holds what this one holds: mirror it from the next step on, in memory of its node.

    share         of what the mirrors of this node may take together
    is_of_results   a replica holds its state: keep what FSDP's reductions have given to it, and nothing else
    paths         of the memory for it: the slots, and for results; filled in
    limit_bytes   that it may take in all; filled in
    limit_share   of a step's time that copying may take; 0: as much as it takes; filled in
    """

    rank: int
    share: float
    is_of_results: bool = False
    paths: tuple[str, ...] = ()
    limit_bytes: int = 0
    limit_share: float = 0.0


class DropReduced(Message, frozen=True):
    """What FSDP's reductions are made of may be dropped once all members have the result, or not any more.

    They may if each rank keeps its results in its mirror, or no rank is replaced but from one.
    """

    may: bool


class AllCompared(Message, frozen=True):
    """All ranks have been compared in full at this boundary; what follows from it was ordered before.

    is_of_step   it is the step after this boundary that is compared: nothing was found of it, or it cannot be compared
    """

    boundary: int
    is_of_step: bool = False


class LookAt(Message, frozen=True):
    """Report digests of all trained tensors before this boundary."""

    boundary: int


class StopDivergent(Message, frozen=True):
    """Wait after the next boundary, to be replaced: this rank's weights differ from those of all replicas."""


# In a recovery. Each has its generation; an order of an older one is void.
#
# Orders of the state machine (`Action`): what it does not know the agents fill in.


class Freeze(Action, frozen=True):
    """Quiesce before the next commit, break all connections; the answer is `RankFrozen`, also of one that is quiesced.

    ranks        survivors, which get this order
    generation   that is being made
    lost         ranks that are being replaced
    repair_type  for the stop handler of a framework; None without one; filled in
    committed    newest boundary that every rank is known to have recorded; 0: none; filled in
    """

    ranks: tuple[int, ...]
    generation: int
    lost: tuple[int, ...]
    repair_type: Strategy | None = None
    committed: int = 0


class Adapt(Message, frozen=True):
    """The ranks of another run from which a rank resumes.

    paths            of the records of its ranks, in their order
    hyperparameters  whose count if they differ, as for `ttprun.capture.replay.merge.Merge`
    """

    paths: tuple[str, ...]
    hyperparameters: str = "auto"


class Replay(ForRank, frozen=True):
    """Run the script in replay up to this boundary; the answer is `RankReplayed`, or MismatchFound.

    source           survivor that will send the state; the rank itself: it will come from its mirror, no other rank
                     holds it; None: from the snapshot of that boundary
    fingerprint      of the source's record of the boundary; None: they need not be alike; filled in
    is_contradicted  another replay of this incident has differed from the run: this one must be compared with it;
                     filled in
    is_before_step   if its mirror has the state: take the last step again in any case, as it communicates; filled in
    adapt            set if the records are of another number of ranks; filled in, as all that follows
    step_from        slot of the lost rank's mirror from which the last step is taken again; "": it is not
    proof_from       slot from which it is taken again in any case, to compare the result with `result`; "": it is not
    result           slot of the state after it; "": there is none
    debug            where it begins: "pdb": stop in the debugger; "nan": stop where a variable gets a NaN; else a file
                     whose code is run there; "": nothing
    given            folder of a kept step, or the `verified` path of one, which is taken again without the other ranks;
                     "": they go on, too
    """

    boundary: int
    source: int | None
    fingerprint: str | None = None
    is_contradicted: bool = False
    is_before_step: bool = False
    adapt: Adapt | None = None
    step_from: str = ""
    proof_from: str = ""
    result: str = ""
    given: str = ""
    debug: str = ""

    @property
    def from_mirror(self) -> bool:
        """The state comes from the lost rank's mirror."""
        return self.source == self.rank

    @property
    def is_joining(self) -> bool:
        """Others go on from where they are.

        If a variable is not restored, what the lost rank has left of its step must show that this does not matter.
        """
        return self.source is not None


class SendState(Action, frozen=True):
    """Send weights and optimizer state within `limit_s`; the answers: `StateSent`, and RankRepaired of each receiver.

    source   survivor that gets this order
    to       the replacements that receive, all of which wait at `boundary`
    name     of the socket, from the run's directory; filled in
    limit_s  filled in
    """

    source: int
    to: tuple[int, ...]
    generation: int
    boundary: int
    name: str = ""
    limit_s: float = 0.0


class FetchState(OfGeneration, frozen=True):
    """Receive weights and optimizer state; the answer is `RankRepaired`. The fields are as in SendState."""

    name: str
    limit_s: float


class SendGradients(AtBoundary, frozen=True):
    """Serve the gradients of the step before a boundary, once this rank has recorded that.

    name, limit_s   as in SendState
    receivers       how many ranks take them
    """

    name: str
    limit_s: float
    receivers: int


class TakeGradients(AtBoundary, frozen=True):
    """Take another rank's gradients of the step before a boundary; the answer is `Aligned`.

    name, limit_s   as in SendState
    source          that rank
    """

    name: str
    limit_s: float
    source: int


class GoOn(Message, frozen=True):
    """All ranks that were to take gradients of the step before this boundary have them."""

    boundary: int


class LoadMirror(ForRank, frozen=True):
    """Load weights and optimizer state from what the lost rank had mirrored; the answer is `RankRepaired`.

    is_before_step   as in Replay; filled in
    path             of the slot; "": they are there, as the last step was taken again; filled in
    """

    boundary: int
    is_before_step: bool = False
    path: str = ""


class LoadState(ForRanks, frozen=True):
    """Load the weights and optimizer state of a snapshot or checkpoint from files; the answer is `RankRepaired`.

    ranks   that get this order, all of which wait at `boundary`; filled in: none, as in Resume
    files   paths of all shares; filled in
    owners  as in NotAlike; filled in
    header  of each parameter [dtype, shape, its state], see `replicated.describe`; filled in
    """

    files: tuple[str, ...] = ()
    owners: dict[str, list[int]] = field(default_factory=dict)
    header: list[Any] = field(default_factory=list)


class Dump(AtBoundary, frozen=True):
    """Write a share of a checkpoint; the answer is `Dumped`.

    boundary  of the checkpoint
    path      of the file
    share     its number
    of        number of shares
    owners    as in NotAlike
    writers   ranks that write a share, in the order of the shares
    mirrors   further shares, from the mirrors of lost ranks
    """

    path: str
    share: int
    of: int
    owners: dict[str, list[int]]
    writers: list[int]
    mirrors: list[MirroredShare] = field(default_factory=list)


class Resume(ForRanks, frozen=True):
    """Connect, issue the journal again, and train; the answers are `RankRebuilt` and `RankReissued`.

    All but the first three fields are filled in.

    ranks       survivors and replacements; filled in: none, so that ranks of a node get the same line
    boundary    at which all stand; 0: replacements run the script live from the top
    expected    by group, the signatures of the collectives that a replacement must issue
    sources     (group, number of a collective, the rank that broadcasts its result)
    received    by point-to-point channel, digests of the messages that a living receiver has: these are not sent again
    settled     by group, how many reduce-scatters of FSDP2 all members have completed: these are not issued again
    takes_from  rank whose gradients this one takes, if inputs of the step turn out to be equal to rounding alone
    """

    expected: dict[str, list[str]] = field(default_factory=dict)
    sources: list[tuple[str, int, int]] = field(default_factory=list)
    received: dict[str, list[str]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    takes_from: int | None = None


# Handled by the recovery thread of a rank, beside `mindio.OfRecovery`.
OfRecovery = (
    Freeze | Replay | SendState | FetchState | SendGradients | TakeGradients | LoadMirror | LoadState | Dump | Resume
)  # fmt: skip
OfStandby = standby_messages.Order | Welcome
Order = (
    OfRecovery | OfStandby
    | Heard | EndAsked | InjectedFault | FaultDone | NotAlike | KeepMirror | DropReduced | AllCompared | LookAt
    | StopDivergent | GoOn
    | from_rank.Put | from_rank.RankUnprotected
)  # fmt: skip
