"""What the next leader must know of a job when the agent that led it is lost. Data only.

Of its own ranks each agent reports it then (`node_reports.Remains`); of the whole job the leader lets all know it while
it leads. Words and units are as in `from_rank.py`.
"""

from __future__ import annotations

from enum import Enum

from msgspec import field

from ttprun.protocol.codec import Message
from ttprun.protocol.reason import Reason


class GroupMembership(Enum):
    """A rank's connection with the others."""

    UNKNOWN = "unknown"  # it has neither taken a step nor made a process group
    JOINED = "joined"  # it has made a process group with others
    ALONE = "alone"  # it takes its steps without one


class Left(Message, frozen=True):
    """How one rank stands after the leader was lost.

    pid         of its newest process, which may have ended; 0: its agent is lost, too
    boundary    of one that is lost: the newest that it has recorded
    code        of one that is lost: the exit code of its process, or minus the signal that ended it
    crashed_at  as in `RankExited`
    membership  what it has reported of its groups last
    unprotected, hindrance   why it cannot be replaced, or not now; none if it can
    """

    rank: int
    pid: int = 0
    is_present: bool = False
    is_protected: bool = False
    is_finished: bool = False
    is_lost: bool = False
    boundary: int = 0
    code: int = 0
    reason: str = ""
    crashed_at: str = ""
    membership: GroupMembership = GroupMembership.UNKNOWN
    unprotected: Reason = Reason()
    hindrance: Reason = Reason()


class Known(Message, frozen=True):
    """What the leader knows of the whole job, for the one that may have to lead next.

    incidents       so far
    unprotected     why no rank can be replaced any more; none if they can
    compared_at     boundary at which the ranks were last compared in full; None: they were not
    differing, shards, names, mirrored, has_collective_steps   as in `Replicas`
    why_no_checkpoints      in this job; "" if they can be written
    saved           checkpoints from which all can resume, by their directories, in the order of preference: boundaries
    """

    incidents: int = 0
    restarts: int = 0
    unprotected: Reason = Reason()
    compared_at: int | None = None
    differing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    why_no_checkpoints: str = ""
    mirrored: tuple[int, ...] = ()
    has_collective_steps: bool = False
    saved: dict[str, int] = field(default_factory=dict)
