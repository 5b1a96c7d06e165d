"""What the agent that leads orders on one node (`Order`), or lets the agents of the others know."""

from __future__ import annotations

from typing import Any

from ttprun.protocol import channel, meeting, node_reports
from ttprun.protocol.all_ranks import in_full, shortened
from ttprun.protocol.codec import Message, decode, encode
from ttprun.protocol.from_rank import Put
from ttprun.protocol.meeting import Known
from ttprun.protocol.process_orders import KillRank, Rewind, SpawnRank
from ttprun.protocol.standby_messages import WarmUp
from ttprun.protocol.to_rank import KeepMirror, LoadMirror, Replay


class Begin(Message, frozen=True):
    """Welcome the ranks, in this generation.

    is_resumed   they resume from a checkpoint, and wait for orders
    """

    generation: int
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
    SpawnRank | KillRank | Replay | LoadMirror | Rewind
    | Begin | VoidEvidence | KeepMirror | VoidBeyond | Broadcast | StorePart | GiveRecords | Strike | Recovered
)  # fmt: skip
OfLeader = (
    Order | Forward | Published | Known | node_reports.Rows | node_reports.Records
    | meeting.Accepted | meeting.Rejected | meeting.Concluded | WarmUp | meeting.RankSlots | meeting.Regroup
    | meeting.SparePools | meeting.Master | meeting.Deposed | meeting.Packed
)  # fmt: skip
