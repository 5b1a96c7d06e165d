"""What the agents of several nodes send each other: one class per message, one line of JSON each (`codec.py`).

One agent leads: the state machine runs there. Every other agent is a *follower*: it reports what happens to the ranks
of its node, and carries out the leader's orders for them. In `agent/cluster`, `peers.py` has the connections,
`leader.py` and `follower.py` handle the messages.

What crosses nodes: the messages of ranks and to ranks (`line`, as in `channel.py`); the rows of the board; starts and
exits of processes. What does not: records, stacks, standbys, logs. Words and units are as in `from_rank.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ttprun.protocol.from_rank import Put


@dataclass(frozen=True)
class Row:
    """How a rank of the sender's node stands.

    values   columns of its row of the board, as in `board.SHARED`
    state    letter of its process in /proc/PID/stat; "": there is none
    cpu_s    processor time of its process
    """

    rank: int
    values: list[int]
    state: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Where:
    """Where an agent listens; "" and 0: nowhere."""

    address: str = ""
    port: int = 0
    token: str = ""


@dataclass(frozen=True)
class Hello:
    """A follower has connected.

    token     of the listener that it has come to, from the rendezvous store or from SparePools
    node      its number in the group; -1: it waits for slots of a lost node
    address   of the node
    alike     what must be the same on all nodes, by its name for people
    shares    this node sees the file that the leader has written next to its checkpoints
    at_s      time of the node's clock, seconds since 1970
    listener      where this agent would listen if it led the next group
    pool      where this agent listens if the one that leads is lost
    """

    token: str
    node: int
    address: str
    alike: dict[str, str]
    shares: bool = False
    at_s: float = 0.0
    listener: Where = Where()
    pool: Where = Where()


@dataclass(frozen=True)
class Accepted:
    """All nodes of the group are there, and fit each other.

    node     number of the receiver in a group that has met again; -1: the one that it has
    size     nodes of that group
    master   address and port for the script's environment there
    """

    node: int = -1
    size: int = 0
    master: str = ""


@dataclass(frozen=True)
class Rejected:
    """The nodes do not fit each other: nothing is started.

    reason   what differs
    cure     what to do
    """

    reason: str
    cure: str


@dataclass(frozen=True)
class Begin:
    """Welcome the ranks, in this generation.

    is_resumed   they resume from a checkpoint, and wait for orders
    """

    generation: int
    is_resumed: bool = False


@dataclass(frozen=True)
class Warmth:
    """What the ranks have imported of torch by their first step, and the files of the user's modules.

    Whoever waits for slots has its standbys import and compile the same.
    """

    modules: list[str]
    files: list[str]


@dataclass(frozen=True)
class RankSlots:
    """Take the slots of a lost node; the records of each of its ranks follow, and then Spawn.

    node     its number
    size     nodes of the group
    ranks    local ranks
    names    addresses of the nodes, by number
    master   address and port for the script's environment
    leader   number of the node whose agent leads
    """

    node: int
    size: int
    ranks: int
    names: dict[int, str]
    master: str
    leader: int = 0


@dataclass(frozen=True)
class Regroup:
    """Take part in a group that starts again on other nodes.

    node        number in it, if all come
    size        nodes
    least       so many must come
    where       its leader listens
    attempt     number of the attempt, as torch counts restarts
    generation  of the group before
    place       of the checkpoint from which all resume; "": from the script's top
    boundary    of that
    reason      which nodes join or leave
    """

    node: int
    size: int
    least: int
    where: Where
    attempt: int
    generation: int
    place: str
    boundary: int
    reason: str


@dataclass(frozen=True)
class Leaving:
    """The launcher of this node has got a signal: it leaves, and the others train on."""

    reason: str


@dataclass(frozen=True)
class GiveRecords:
    """Send what this node keeps of the records of these lost ranks."""

    ranks: list[int]


@dataclass(frozen=True)
class Records:
    """What a lost rank has recorded, packed (`agent/cluster/record_copies.py`); "" if there is no copy."""

    rank: int
    part: str


# The next leader. The agents know of each other from SparePools; who leads no more is not asked.


@dataclass(frozen=True)
class SparePools:
    """Where the agents listen: if the one that leads is lost, the next one does, and the others connect to it.

    pools    of the agents that are there, by node, the leader's among them
    waiting  launchers that wait for slots
    listeners    as in Hello, by node
    """

    pools: dict[int, Where]
    waiting: int
    listeners: dict[int, Where] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What the leader knows of the whole job, for the one that may have to lead next.

    incidents       so far
    unprotected     why no rank can be replaced any more; "" if they can
    compared_at     boundary at which the ranks were last compared in full; None: they were not
    parted, shards, names   as in `recovery.Replicas`
    why_no_checkpoints      in this job; "" if they can be written
    saved           checkpoints from which all can resume, by their directories, in the order of preference: boundaries
    """

    incidents: int
    restarts: int
    unprotected: str
    compared_at: int | None
    parted: dict[str, list[int]]
    shards: dict[str, list[int]]
    names: dict[str, str]
    why_no_checkpoints: str
    saved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """How one rank of the sender's node stands after the leader was lost.

    pid         of its newest process, which may have ended
    boundary    of one that is lost: the newest that it has recorded
    code        of one that is lost: the exit code of its process, or minus the signal that ended it
    membership  value of `recovery.members.Ties`
    unprotected, hindrance   why it cannot be replaced, or not now; "" if it can
    """

    rank: int
    pid: int
    is_present: bool
    is_protected: bool
    is_finished: bool
    is_lost: bool
    boundary: int
    code: int
    reason: str
    membership: str
    unprotected: str
    hindrance: str


@dataclass(frozen=True)
class Remains:
    """What a follower reports to the next leader, before anything else.

    generation   the newest that it knows of
    rows         of its ranks
    """

    generation: int
    ranks: list[Left]
    now_ns: int
    rows: list[Row]


@dataclass(frozen=True)
class Deposed:
    """The sender's node goes on with another leader, or has given the receiver's node up: it must end.

    reason   for people
    """

    reason: str


@dataclass(frozen=True)
class Master:
    """Processes that are started from now on find their store elsewhere.

    where   address and port for the script's environment
    """

    where: str


# Reports of a follower.


@dataclass(frozen=True)
class Started:
    """A rank has a process, which was welcomed."""

    rank: int
    pid: int


@dataclass(frozen=True)
class NotStarted:
    """A rank has got no process."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Said:
    """A message of a rank.

    line    the message
    now_ns  time.monotonic_ns() of the sender, for the times in the row
    fingerprints   boundary -> what replicas have alike in their records of it, hashed; only with some messages
    """

    rank: int
    pid: int
    line: str
    now_ns: int
    row: Row
    fingerprints: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A process has ended.

    code             its exit code, or minus the signal that ended it
    is_script_error  as in `RankExited`
    traceback        as in `Failure`
    """

    rank: int
    pid: int
    code: int
    boundary: int
    is_script_error: bool
    device_fault: str
    reason: str
    traceback: str
    now_ns: int
    row: Row


@dataclass(frozen=True)
class Rows:
    """How ranks stand: a few times a second, and so the sender's sign of life. The leader sends those of all others.

    is_awaited   something has changed for which ranks of other nodes wait
    """

    now_ns: int
    rows: list[Row]
    is_awaited: bool = False


@dataclass(frozen=True)
class Differs:
    """The record that a lost rank has left is not that of the rank which would repair it."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True)
class EndAsked:
    """The launcher of this node has got a signal that ends the job."""

    reason: str
    signal: int


@dataclass(frozen=True)
class FaultAsked:
    """`ttprun inject-fault` has asked for a fault on this node."""

    fault: str


@dataclass(frozen=True)
class PartStored:
    """What this node's agent has of a rank's own is written for a checkpoint.

    bytes, xxh3   of the file
    why_not       why there is none; "" if there is
    """

    rank: int
    boundary: int
    bytes: int
    xxh3: str
    why_not: str


# Orders of the leader.


@dataclass(frozen=True)
class Tell:
    """Forward a message to a rank, if it still has this process."""

    rank: int
    pid: int
    line: str


@dataclass(frozen=True)
class Broadcast:
    """Forward what a rank reports to all others, to the ranks of this node.

    rank   who has reported it
    """

    rank: int
    put: Put


@dataclass(frozen=True)
class Spawn:
    """Give a lost rank a process; the answer is Started or NotStarted."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Kill:
    """End a rank's process."""

    rank: int
    reason: str


@dataclass(frozen=True)
class VoidEvidence:
    """What a rank gave to its newest step was wrong: its replacement must not be measured against that."""

    rank: int


@dataclass(frozen=True)
class Replay:
    """Order a replacement to run the script in replay, if its record fits that of its source; else Differs.

    source       the rank that sends the state; the rank itself: its mirror has it
    fingerprint  of the source's record of the boundary; None: they need not be alike
    is_joining, is_contradicted   as in to_rank.Replay
    """

    rank: int
    generation: int
    boundary: int
    source: int
    fingerprint: str | None
    is_joining: bool
    is_contradicted: bool


@dataclass(frozen=True)
class VoidBeyond:
    """What lost ranks have recorded beyond this boundary is void."""

    boundary: int


@dataclass(frozen=True)
class StorePart:
    """Write a rank's own part of a checkpoint to this file; the answer is PartStored."""

    rank: int
    boundary: int
    path: str


@dataclass(frozen=True)
class GoBack:
    """Put what was stored of these ranks in the place of what they have recorded; else Differs.

    place       of the checkpoint; "": what the agent itself keeps, or nothing: they start anew
    is_adapted  it is of other ranks or arguments: the ranks have no past
    trusted     those of which nothing says that their state was wrong: they must do again what they have done since
    """

    ranks: list[int]
    generation: int
    boundary: int
    place: str
    is_adapted: bool
    trusted: list[int]


@dataclass(frozen=True)
class Published:
    """How the whole job stands: what the leader has just written to its own run directory.

    name   status or topology
    text   the file's content
    """

    name: str
    text: str


@dataclass(frozen=True)
class Strike:
    """Cause a fault in this node now, one that comes from outside.

    pid          the process of the rank that it is meant for
    number       of the strike
    is_reported  the rank has reported it, and waits for the agent's part in it
    """

    rank: int
    pid: int
    number: int
    fault: str
    is_reported: bool


@dataclass(frozen=True)
class Recovered:
    """An incident has ended well: standbys are to be refilled."""


@dataclass(frozen=True)
class Concluded:
    """The group has come to its end, as in `Verdict`.

    exit_code   of the rank that has caused it, or minus a signal
    ended_by    the signal to a launcher that has ended the job; 0: none has
    """

    kind: str
    reason: str
    has_progress: bool
    exit_code: int
    ended_by: int = 0


Order = (
    Begin | Spawn | Kill | VoidEvidence | Replay | VoidBeyond | Broadcast | StorePart | GiveRecords | GoBack | Strike
) | Recovered
OfFollower = (
    Hello
    | Started
    | NotStarted
    | Said
    | Ended
    | Rows
    | Differs
    | EndAsked
    | FaultAsked
    | PartStored
    | Records
    | Leaving
    | Remains
    | Deposed
)
OfLeader = (
    Accepted
    | Rejected
    | Begin
    | Tell
    | Broadcast
    | VoidEvidence
    | Spawn
    | Kill
    | Replay
    | VoidBeyond
    | StorePart
    | GoBack
    | Published
    | Strike
    | Recovered
    | Concluded
    | Rows
    | Warmth
    | RankSlots
    | Regroup
    | GiveRecords
    | Records
    | SparePools
    | Known
    | Master
    | Deposed
)
