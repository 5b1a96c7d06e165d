"""What the leader finds out or is asked, as events; faults are in `fault_events.py`. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ttprun.protocol.rank_events import Event, RankEvent
from ttprun.recovery.replicas import UNKNOWN, Replicas
from ttprun.recovery.shards import ReplicaGroup


class RanksCompared(Event, frozen=True, kw_only=True):
    """All ranks have reported digests of what they hold, and it is known who is a replica of whom.

    replicas   what is known now
    """

    replicas: Replicas


class ReplacementAsked(Event, frozen=True, kw_only=True):
    """Healthy ranks are to give their places to new processes.

    ranks    at least one, each once
    reason   who asked, and why
    """

    ranks: tuple[int, ...]
    reason: str

    kind: ClassVar[str] = "planned"

    @property
    def sentence(self) -> str:
        """What was asked, for an operator."""
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks} had to be replaced as requested ({self.reason})"


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
    """

    boundary: int | None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk from which all ranks can resume.

    boundary   of the optimizer step that it holds
    place      its directory
    """

    boundary: int
    place: str


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
