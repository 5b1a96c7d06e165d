"""How the agents of several nodes meet, and how slots, nodes and the lead pass from one to another.

This file and `node_messages.py` have what they send each other: one class per message, one line of
JSON each (`codec.py`).

One agent leads: the state machine runs there. Every other agent is a *follower*: it reports what happens to the ranks
of its node, and carries out the leader's orders for them. `agent/base/peers.py` has the connections,
`agent/lead/coordinator.py` and `agent/between/agent.py` handle the messages.

What crosses nodes: the messages of ranks and to ranks (`line`, as in `channel.py`); the rows of the board; starts and
exits of processes. What does not: records, stacks, standbys, logs. Words and units are as in `from_rank.py`.
"""

from __future__ import annotations

from enum import Enum

from msgspec import field

from ttprun.protocol.codec import Message, OfGeneration
from ttprun.protocol.reason import Reason

WAITS, ASKS = -1, -2  # in place of a node's number


class Where(Message, frozen=True):
    """Where an agent listens; "" and 0: nowhere.

    page   address at which its launcher shows the job to other machines; "": at none
    name   what the scheduler calls its node; "": nothing is known
    seen   a file next to its checkpoints: a node that sees it shares the save directory; "": there is none
    store  where the launchers of the job meet, host:port; "": where the user says
    """

    address: str = ""
    port: int = 0
    token: str = ""
    page: str = ""
    name: str = ""
    seen: str = ""
    store: str = ""


class BoardRow(Message, frozen=True):
    """How a rank of the sender's node stands.

    values   columns of its row of the board, as in `board.SHARED`
    state    letter of its process in /proc/PID/stat; "": there is none
    cpu_s    processor time of its process
    """

    rank: int
    values: list[int]
    state: str = ""
    cpu_s: float = 0.0


class GroupMembership(Enum):
    """A rank's connection with the others."""

    UNKNOWN = "unknown"  # it has neither taken a step nor made a process group
    JOINED = "joined"  # it has made a process group with others
    ALONE = "alone"  # it takes its steps without one


class Legacy(Message, frozen=True):
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


class Remains(OfGeneration, frozen=True):
    """What a follower reports to the next leader: how its ranks stand.

    generation   the newest that it knows of
    rows         of its ranks
    """

    ranks: list[Legacy]
    now_ns: int
    rows: list[BoardRow]


class Hello(Message, frozen=True):
    """A follower has connected.

    token     of the listener that it has come to, from the rendezvous store or from SparePools
    node      its number in the group; WAITS: it waits for slots of a lost node; ASKS: whether the job goes on
    address   of the node
    alike     what must be the same on all nodes, by its name for people
    shares    this node sees the file that the listener names (`Where.seen`)
    at_s      time of the node's clock, seconds since 1970
    listener      where this agent would listen if it led the next group
    pool      where this agent listens if the one that leads is lost
    remains   what it has, if it comes to the next leader of the same group
    """

    token: str
    node: int
    address: str
    alike: dict[str, str]
    shares: bool = False
    at_s: float = 0.0
    listener: Where = Where()
    pool: Where = Where()
    remains: Remains | None = None


class Accepted(Message, frozen=True):
    """All nodes of the group are there, and fit each other; or the receiver may wait for slots.

    node     number of the receiver in the group
    size     nodes of the group
    master   address and port for the script's environment
    """

    node: int = WAITS
    size: int = 0
    master: str = ""


class Rejected(Message, frozen=True):
    """The nodes are no group: nothing is started.

    reason   what differs, or that too few have come
    cure     what to do; "": too few have come
    """

    reason: str
    cure: str


class RankSlots(Message, frozen=True):
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


class Regroup(Message, frozen=True):
    """Take part in a group that starts again on other nodes.

    node        number in it, if all come
    size        nodes
    least       so many must come
    stayed      the first ones, which were nodes of the group before
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
    stayed: int
    where: Where
    attempt: int
    generation: int
    place: str
    boundary: int
    reason: str


class SparePools(Message, frozen=True):
    """Where the agents listen: if the one that leads is lost, the next one does, and the others connect to it.

    pools    of the agents that are there, by node, the leader's among them
    others   agents that may live beside these: they wait for slots, or were cut off a moment ago
    listeners    as in Hello, by node
    """

    pools: dict[int, Where]
    others: int
    listeners: dict[int, Where] = field(default_factory=dict)


class Packed(Message, frozen=True):
    """A message to all nodes that is long: how all ranks stand, or where they can be reached.

    line   compressed (zlib)
    """

    line: bytes


class Master(Message, frozen=True):
    """Processes that are started from now on find their store elsewhere.

    where   address and port for the script's environment
    """

    where: str


class Deposed(Message, frozen=True):
    """The sender's node goes on with another leader, or has given the receiver's node up: it must end.

    reason   for people
    """

    reason: str


class Concluded(Message, frozen=True):
    """The group has come to its end, as in `Verdict`.

    exit_code   of the rank that has caused it, or minus a signal
    ended_by    the signal to a launcher that has ended the job; 0: none has
    """

    kind: str
    reason: str
    has_progress: bool
    exit_code: int
    ended_by: int = 0
    reason_kind: str = ""


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
