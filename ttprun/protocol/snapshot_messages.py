"""What a rank reports of snapshots and checkpoints: one class per message. Words and units are as in `from_rank.py`."""

from __future__ import annotations

from typing import Any

from msgspec import field

from ttprun.protocol.codec import Message, OfGeneration

PARTS = 64  # of a collective's input, each of which has a short digest behind that of the whole
PART_DIGITS = 4


class Share(Message, frozen=True):
    """One rank's share of the replicated state, which it has written.

    share        its number; the first one also has the fields that only one rank fills
    bytes        of its file
    xxh3         of its file; "" in memory
    header_xxh3  of `header` without what differs between ranks: must be the same in all
    digests      key of each parameter -> digest of its weights and optimizer state
    differing    hash of the parameters that the rank knows to differ between ranks
    header       of each parameter [dtype, shape, its state], see `replicated.describe`; empty if another share has it
    model        variable -> name in its state_dict -> (file, key)
    held         of each sharded tensor [name, [[rank, shape, offsets, sizes]]]
    """

    share: int
    bytes: int
    xxh3: str
    header_xxh3: str
    digests: dict[str, str]
    differing: str
    header: list[Any] = field(default_factory=list)
    model: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


class SnapshotSize(Message, frozen=True):
    """An estimate of the bytes that each rank will copy for a snapshot, after the first step."""

    bytes: int


class SnapshotTaken(Message, frozen=True):
    """A rank has copied its part of a snapshot into shared memory, or could not.

    number         of the requested snapshot; with rows: 0 of the rank itself, else of `TakeAgain`
    why_not        "" if it was taken
    share          None if it was not
    records_bytes  of its own records
    took_s         for the copy
    rows           set: what the step after the snapshot came to, in the order in which it was computed: what it is, its
                   digest, and how large it is, as text; `why_not` then says why it cannot be compared
    layouts        of a row that holds gradients of DDP or FSDP2: name and size of each parameter whose is in it
    """

    number: int
    boundary: int
    why_not: str = ""
    share: Share | None = None
    records_bytes: int = 0
    took_s: float = 0.0
    rows: tuple[tuple[str, str, str], ...] | None = None
    layouts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class MirroredShare(Message, frozen=True):
    """A share of a checkpoint that is written from the mirror of a lost rank.

    rank   that is lost
    path   of the file to write
    share  its number
    slot   of its mirror; the agent of the node that keeps it fills it in
    """

    rank: int
    path: str
    share: int
    slot: str = ""


class Dumped(OfGeneration, frozen=True):
    """A rank has written its share of a checkpoint, or could not.

    why_not     "" if it was written
    is_handled  the script handles a signal that ends jobs, and may save by itself
    share       None if it was not written
    mirrored    lost rank -> share that was written from its mirror
    """

    why_not: str
    is_handled: bool
    share: Share | None = None
    mirrored: dict[int, Share] = field(default_factory=dict)


Report = SnapshotSize | SnapshotTaken | Dumped
