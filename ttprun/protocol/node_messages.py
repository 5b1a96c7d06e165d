"""What agents send each other: what each reports to the one that leads (`Report`), and what that one orders (`Order`).

The leader's own node reports the same, with no connection in between. A list of all ranks of the job is an empty one on
the way, so that a report or order that each rank gets stays short: `shortened` before it is sent, `in_full` after.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import field
from msgspec.structs import asdict, replace

from ttprun.protocol import channel, meeting
from ttprun.protocol.board import SHARED, Field
from ttprun.protocol.codec import Message, OfGeneration, Refused, decode, decode_fields, encode, fields_of
from ttprun.protocol.from_rank import Put, RankFrozen
from ttprun.protocol.meeting import BoardRow, Known
from ttprun.protocol.process_orders import KillRank, ParkRank, Rewind, SpawnRank, TakeBack
from ttprun.protocol.rank_events import MismatchFound, RankExited, RankStarted, SpawnFailed, StopAsked
from ttprun.protocol.standby_messages import WarmUp
from ttprun.protocol.to_rank import Freeze, KeepMirror, LoadMirror, Replay


def shortened(message: Any, world_size: int) -> Any:
    """The message as it is sent to another agent."""
    match message:
        case RankFrozen(journal=journal):
            names = [name for name, group in journal.items() if group.ranks == _all(world_size)]
            short = {name: replace(journal[name], ranks=[]) for name in names}
            return replace(message, journal=journal | short) if short else message
        case Freeze(ranks=ranks, lost=lost) if ranks == _but(lost, world_size):
            return replace(message, ranks=())
    return message


def in_full(message: Any, world_size: int) -> Any:
    """The message as it was before it was shortened."""
    match message:
        case RankFrozen(journal=journal):
            full = {name: replace(group, ranks=_all(world_size)) for name, group in journal.items() if not group.ranks}
            return replace(message, journal=journal | full) if full else message
        case Freeze(ranks=(), lost=lost):
            return replace(message, ranks=_but(lost, world_size))
    return message


@cache
def _all(world_size: int) -> list[int]:
    """One list for all reports: that of each rank would be as many as there are ranks, squared."""
    return list(range(world_size))


def _but(lost: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    gone = frozenset(lost)
    return tuple(rank for rank in range(world_size) if rank not in gone)


_LARGEST = 1 << 63  # what a cell of the board cannot hold
_LONGEST_S = 1e9
_LATEST_NS = 1 << 62  # of a time, which is moved to the receiver's clock
_TIMES = [SHARED.index(column) for column in (Field.SEEN_NS, Field.PULSE_NS)]


class Rows(Message, frozen=True):
    """How ranks stand: a few times a second, and so the sender's sign of life. The leader sends those of all others.

    is_awaited   something has changed for which ranks of other nodes wait
    """

    now_ns: int
    rows: list[BoardRow]
    is_awaited: bool = False


class Said(Message, frozen=True):
    """A message of a rank.

    message      the message; between nodes its fields (`encoded`)
    fingerprint  with RankFrozen: what replicas have alike in their records of its boundary, hashed
    rows         how the rank stands, as in Rows; filled in between nodes, as the fingerprint: on its own node the
                 agent sees both
    """

    rank: int
    pid: int
    message: Any
    fingerprint: str = ""
    rows: list[BoardRow] = field(default_factory=list)
    now_ns: int = 0

    def encoded(self, world_size: int, stands: Rows) -> Said:
        """As it is sent to another agent."""
        message = fields_of(shortened(self.message, world_size))
        return replace(self, message=message, rows=stands.rows, now_ns=stands.now_ns)

    def decoded(self, world_size: int) -> Said:
        """As it was before that; its message is `Refused` if it is none."""
        if not isinstance(self.message, dict):
            return replace(self, message=Refused("not an object"))
        message = decode_fields(dict(self.message), channel.KNOWN)
        return replace(self, message=in_full(message, world_size))


class FaultAsked(Message, frozen=True):
    """`ttprun inject-fault` has asked for a fault on this node."""

    fault: str


class PartStored(Message, frozen=True):
    """What this node's agent has of a rank's own is written for a checkpoint.

    bytes, xxh3   of the file
    why_not       why there is none; "" if there is
    """

    rank: int
    boundary: int
    bytes: int
    xxh3: str
    why_not: str


class Records(Message, frozen=True):
    """What the next node keeps of a lost rank.

    part     its records, packed (`agent/node/state_copies.py`); "" if there is no copy
    mirror   where its mirror is to be fetched (`agent/node/mirrors.py`); port 0: nowhere
    """

    rank: int
    part: str
    mirror: meeting.Where = meeting.Where()


class Leaving(Message, frozen=True):
    """The launcher of this node has got a signal: it leaves, and the others train on."""

    reason: str


Report = (
    Said | RankStarted | SpawnFailed | RankExited | MismatchFound | StopAsked
    | FaultAsked | PartStored | Records | Leaving
)  # fmt: skip
OfFollower = Report | Rows | meeting.Hello | meeting.Deposed


def why_unfit(message: Any, world_size: int) -> str:
    """Why a message of another agent cannot be of a job with so many ranks; "" if it can."""
    fields = asdict(message)
    rows = fields.get("rows", ())
    named = fields.get("ranks", ())
    named = named if isinstance(named, list | tuple) else ()  # of RankSlots it is their number
    ranks = [row if isinstance(row, int) else row.rank for row in (*named, *rows)]
    ranks += [fields["rank"]] if "rank" in fields else []
    ranks += [rank for rank, _ in (*fields.get("to", ()), *fields.get("puts", ()))]
    odd = next((rank for rank in ranks if not 0 <= rank < world_size), None)
    if odd is not None:
        return f"it names rank {str(odd)[:20]}, and the world size is {world_size}"
    if any(len(row.values) != len(SHARED) for row in rows):
        return "a row of the board has another number of columns"
    times = [fields.get("now_ns", 0), *(row.values[at] for row in rows for at in _TIMES)]
    is_in_range = all(min(row.values) >= -_LARGEST and max(row.values) < _LARGEST for row in rows)
    if not is_in_range or not all(-_LATEST_NS < time < _LATEST_NS for time in times):
        return "a number of a row is out of range"
    if not 0 <= (fields.get("signal") or 0) < 65 or not -65 < (fields.get("code") or 0) < 256:
        return "there is no such signal or exit code"
    if isinstance(message, RankExited) and (message.code is None) == (message.signal is None):
        return "a process ends with a code or by a signal"
    if not 0 <= fields.get("detected_after_s", 0) < _LONGEST_S:
        return "a time is out of range"
    return ""


class Begin(OfGeneration, frozen=True):
    """Welcome the ranks, in this generation.

    is_resumed   they resume from a checkpoint, and wait for orders
    """

    is_resumed: bool = False


class Forward(Message, frozen=True):
    """Forward a message to ranks of this node.

    to     (rank, pid): to each that still has this process
    line   of `encoded`
    """

    to: list[tuple[int, int]]
    line: str

    def message(self, world_size: int) -> Any:
        """The message, or `Refused`."""
        return in_full(decode(self.line.encode(errors="surrogatepass"), channel.KNOWN), world_size)


def encoded(message: Any, world_size: int) -> str:
    """A message for ranks, encoded once for all that get it."""
    return encode(shortened(message, world_size)).decode().rstrip("\n")


class Broadcast(Message, frozen=True):
    """Forward what ranks report to all others, to the ranks of this node.

    puts   (rank who has reported it, what it is)
    """

    puts: list[tuple[int, Put]]


class VoidEvidence(Message, frozen=True):
    """What a rank gave to its newest step was wrong: its replacement must not be measured against that."""

    rank: int


class VoidBeyond(Message, frozen=True):
    """What lost ranks have recorded beyond this boundary is void."""

    boundary: int


class StorePart(Message, frozen=True):
    """Write a rank's own part of a checkpoint to this file; the answer is PartStored."""

    rank: int
    boundary: int
    path: str


class GiveRecords(Message, frozen=True):
    """Send what this node keeps of the records of these lost ranks."""

    ranks: list[int]


class Strike(Message, frozen=True):
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


class TakeAgain(Message, frozen=True):
    """Have another process take a rank's step after this boundary; the answer is a SnapshotTaken of this number.

    number   from 1, of this step; 0: nobody waits for it any more
    """

    rank: int
    boundary: int
    number: int


class Recovered(Message, frozen=True):
    """An incident has ended well: standbys are to be refilled."""


class Published(Message, frozen=True):
    """How the whole job stands: what the leader has just written to its own run directory.

    name   status or topology
    text   the file's content
    """

    name: str
    text: str


# What a node's actuator carries out.
Order = (
    SpawnRank | KillRank | ParkRank | TakeBack | Replay | LoadMirror | Rewind
    | Begin | VoidEvidence | KeepMirror | VoidBeyond | Broadcast | StorePart | GiveRecords | Strike | Recovered
    | TakeAgain
)  # fmt: skip
OfLeader = (
    Order | Forward | Published | Known | Rows | Records
    | meeting.Accepted | meeting.Rejected | meeting.Concluded | WarmUp | meeting.RankSlots | meeting.Regroup
    | meeting.SparePools | meeting.Master | meeting.Deposed | meeting.Packed
)  # fmt: skip
