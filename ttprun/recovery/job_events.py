"""Events, as data only: first those that can open an incident, each with a kind and a sentence for the operator.

Then what the leader finds out or is asked.

A new kind of real fault: the text of a device's error is a row of `device/device_errors.py`, and nothing else. What is
found by the agent is an event here, its rows in `machine.py`, its answer in `on_loss.py` (also in `LossEvent`) or
`on_hang.py`, and who finds it in `agent/lead`; what a rank or a node reports, also a message of `protocol`, which
`agent/lead/reports.py` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ttprun.protocol.rank_events import Event, LivingRankLost, RankEvent, because
from ttprun.recovery.replicas import UNKNOWN, Judgement, Layouts, Replicas, Rows, judge
from ttprun.recovery.shards import ReplicaGroup


def name_ranks(ranks: tuple[int, ...]) -> str:
    """ "rank 2", or "ranks 0, 3"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"


class RankHung(LivingRankLost, frozen=True, kw_only=True):
    """A rank's process is there, but does not get on while others wait for it. It is killed, and then lost.

    detected_after_s   seconds since it last got on
    reason             how it hangs: phase, collective, how long, innermost frame
    is_in_script       in a step, in a call of the script's that does not return: a new process may come there again
    is_overdue         the process group's own time limit is over: under torchrun the job would end now
    """

    is_in_script: bool = False
    is_overdue: bool = False
    kind: ClassVar[str] = "hang"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} hung in step {self.boundary}{because(self.reason)}"


class RankDiverged(LivingRankLost, frozen=True, kw_only=True):
    """A rank's weights differ from the majority's. It is killed, and so lost; its replacement gets the majority's.

    detected_after_s   not known: a replica may have diverged at any moment since all were last alike
    reason             at which boundary it was seen
    """

    kind: ClassVar[str] = "divergence"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} has diverged ({self.reason})"


class StepDiffers(LivingRankLost, frozen=True, kw_only=True):
    """A rank has computed its step after a snapshot otherwise than two other processes have from the same state.

    boundary           newest that the rank has passed
    detected_after_s   not known: it may have gone wrong at any moment of that step
    reason             what it has computed otherwise
    is_before          no rank has used what it gave: the others hold what they held at that boundary
    """

    is_before: bool = False
    kind: ClassVar[str] = "corruption"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"rank {self.rank} is suspect: {self.reason}"

    @staticmethod
    def judge(taken: Sequence[Rows], layouts: Layouts) -> Judgement:
        """As `replicas.judge`: whether there is such an event."""
        return judge(taken, layouts)


class NodeLost(Event, frozen=True, kw_only=True):
    """A node is lost with all of its ranks: its agent is not heard any more.

    ranks              all of its ranks
    name               of the node, for people
    boundary           newest boundary that one of its ranks is known to have recorded
    detected_after_s   seconds since the node was last heard
    reason             how it was noticed
    """

    ranks: tuple[int, ...]
    name: str
    boundary: int
    detected_after_s: float = 0.0
    reason: str = ""

    kind: ClassVar[str] = "node-lost"
    is_script_error: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        """The lowest one, by which the fault is recognized if it comes back."""
        return self.ranks[0]

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        return f"{self.name} was lost with {name_ranks(self.ranks)} in step {self.boundary}{because(self.reason)}"


class ConnectionBroken(Event, frozen=True, kw_only=True):
    """A connection between ranks is broken or silent, though every process lives and all ranks are equally far.

    generation         of the connections
    boundary           newest boundary that all ranks have passed
    rank               whose device has lost a link; None: none, or unknown
    detected_after_s   seconds since anything last moved
    device_fault       the device fault, "" if it is none
    reason             who noticed, and how
    is_silent          nothing has broken, but nothing moves
    """

    generation: int
    boundary: int
    rank: int | None = None
    detected_after_s: float = 0.0
    device_fault: str = ""
    reason: str = ""
    is_silent: bool = False

    @property
    def kind(self) -> str:
        """The fault in a word: "connection", "link"."""
        return self.device_fault or "connection"

    @property
    def sentence(self) -> str:
        """The fault for an operator."""
        if self.is_silent:
            return self.reason
        return f"the connections broke in step {self.boundary} ({self.reason})"


class RanksCompared(Event, frozen=True, kw_only=True):
    """All ranks have reported digests of what they hold, and it is known who is a replica of whom.

    replicas   what is known now
    """

    replicas: Replicas


class ReplacementAsked(Event, frozen=True, kw_only=True):
    """Healthy ranks are to give their places to new processes.

    ranks    at least one, each once
    reason   who asked, and why
    node     their node, which leaves with all of them, for people; "": they stay on it
    is_kept  their processes stand still until the new ones have caught up, and go on if that fails
    """

    ranks: tuple[int, ...]
    reason: str
    node: str = ""
    is_kept: bool = False

    kind: ClassVar[str] = "planned"

    @property
    def sentence(self) -> str:
        """What was asked, for an operator."""
        who = name_ranks(self.ranks)
        if self.node:
            return f"{self.node} with {who} was drained as requested ({self.reason})"
        return f"{who} had to be replaced as requested ({self.reason})"


class ElasticDeclared(RankEvent, frozen=True, kw_only=True):
    """A rank can continue in a smaller group, and declares which ranks train the same parameters.

    replicas        groups over which its optimizers are spread; () if every rank holds all that the others hold
    data_parallel   the group over which the batches are spread; () if that is one of these
    """

    replicas: tuple[ReplicaGroup, ...] = ()
    data_parallel: tuple[int, ...] = ()


class DowngradeAsked(Event, frozen=True, kw_only=True):
    """The others are to train on without the ranks that are lost, and not to wait for replacements.

    reason   who asked, and why
    """

    reason: str


class UpgradeAsked(Event, frozen=True, kw_only=True):
    """The ranks that are away are to come back.

    reason   who asked, and why
    """

    reason: str

    kind: ClassVar[str] = "upgrade"


class SnapshotTaken(Event, frozen=True, kw_only=True):
    """A snapshot that is complete and can be gone back to, older ones are void.

    boundary   at which it was taken; None: there is none any more
    rank       whose own it is, which trains alone; None: that of all ranks
    is_own     it is what a rank that is alone keeps of itself, beside which there may be a snapshot
    """

    boundary: int | None
    rank: int | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A stored state from which all ranks, or one that is alone, can resume.

    boundary   of the optimizer step that it holds
    place      directory of the checkpoint; "": it is in memory
    is_own     in memory: it is what the rank that is alone keeps of itself, and no snapshot
    """

    boundary: int
    place: str = ""
    is_own: bool = False


class ResumeAsked(Event, frozen=True, kw_only=True):
    """The job's ranks are about to be started, and resume from a checkpoint instead of the top of the script.

    saved     the checkpoints from which they can resume, in the order of preference; at least one
    replicas  which of the ranks that have written the first one held the same
    """

    saved: tuple[Saved, ...]
    replicas: Replicas = UNKNOWN


class CheckpointAsked(Event, frozen=True, kw_only=True):
    """The user wants a checkpoint now."""


class StatePersisted(Event, frozen=True, kw_only=True):
    """A checkpoint is written, or could not be.

    generation    in which it was ordered
    place         where it is; "" if it was not written
    why_not       why it was not written; "" if it was
    why_unusable  why no run can resume from it, though it was written; "" if one can
    without       what a run that resumes from it has as its set-up makes it; "" if nothing
    is_handled    the script handles the signal that ends it, and must resume for that
    """

    generation: int
    place: str = ""
    why_not: str = ""
    why_unusable: str = ""
    without: str = ""
    is_handled: bool = False


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """A deadline that SetDeadline asked for is over. Deadlines are never taken back: a late one is an echo.

    generation, name, rank   as in the SetDeadline
    silent             ranks without a sign of life, or for which the others wait, as far as the agent knows
    """

    generation: int
    name: str
    silent: tuple[int, ...] = ()
    rank: int | None = None


class SupervisorRenewed(Event, frozen=True, kw_only=True):
    """The agent has failed, and a new one goes on with this job: what was ordered last may not have been carried out.

    reason   what has failed, a phrase
    rank     whose own repair is concerned, see `alone.py`; None: the whole job
    """

    reason: str
    rank: int | None = None


class GroupRestarted(Event, frozen=True, kw_only=True):
    """The agent has ended all ranks and is starting them anew: a RankStarted for each follows."""


class ResizeAsked(Event, frozen=True, kw_only=True):
    """Nodes join or leave: the group must start again on other nodes, from its state now.

    reason   which nodes, a phrase
    """

    reason: str


class GroupResized(Event, frozen=True, kw_only=True):
    """The group starts again on other nodes; the job has their number of ranks already (`with_size`).

    saved      the checkpoint from which all resume; none: they run the script from its top
    replicas   as in ResumeAsked
    reason     which nodes, for an agent that did not lead before
    has_grown  nodes have come that were not there before
    """

    saved: tuple[Saved, ...]
    replicas: Replicas
    reason: str
    has_grown: bool = False
