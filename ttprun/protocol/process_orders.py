"""Orders of the state machine that the agent of one node carries out, whether it leads or not. Data only.

What is filled in on the way is not known to the machine. Its orders that go on to ranks (Freeze, Replay, SendState,
LoadMirror, LoadState, Resume) are in `to_rank.py`, those for the agent that leads in `ttprun.recovery.phases`.
"""

from __future__ import annotations

from ttprun.protocol.codec import Message


class Action(Message, frozen=True):
    """An order."""


class ForRank(Action, frozen=True):
    """An order for one rank, in a generation."""

    rank: int
    generation: int


class ForRanks(Action, frozen=True):
    """An order for ranks that stand at a boundary, or will, in a generation."""

    ranks: tuple[int, ...]
    generation: int
    boundary: int


class SpawnRank(ForRank, frozen=True):
    """Give a lost rank a process, from the standbys if there is one; the answer is RankStarted, or SpawnFailed.

    generation   in which it was asked for; if ranks are lost meanwhile, Replay or Resume names a newer one
    """


class KillRank(Action, frozen=True):
    """End the rank's process and its children at once. Its exit is expected and will be dropped.

    is_late   a deadline has condemned it, and nobody has its stack yet; filled in
    """

    rank: int
    reason: str
    is_late: bool = False


class ParkRank(Action, frozen=True):
    """Stop the rank's process where it stands, and give its place away; it is killed once the job has recovered."""

    rank: int
    reason: str


class TakeBack(Action, frozen=True):
    """A rank's parked process gets its place again; its replacement is killed, and if it starts later it is not heard.

    pid   of the parked process
    """

    rank: int
    pid: int
    reason: str


class Rewind(Action, frozen=True):
    """Put stored records in the place of the ranks' own; all their processes have been ended before.

    If they cannot be used, the answer is MismatchFound.

    ranks        all ranks of the job, or the one that goes back alone; filled in: those of one node
    boundary     of the snapshot or checkpoint; 0: the ranks begin anew, and have no past
    place        directory of the checkpoint; "": what the agent itself keeps, or nothing
    is_own       what the agent keeps is the rank's own state, and no snapshot
    generation   of the job; filled in
    is_adapted   it is of other ranks or arguments: the ranks have no past; filled in
    trusted      those of which nothing says that their state was wrong: they must do again what they have done since;
                 filled in
    """

    ranks: tuple[int, ...]
    boundary: int
    place: str = ""
    is_own: bool = False
    generation: int = 0
    is_adapted: bool = False
    trusted: tuple[int, ...] = ()
