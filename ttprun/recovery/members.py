"""The ranks of a job: one `Member` each, and all of them with counts, by which an event is answered without a scan.

A job of 16,384 ranks hears three answers of each in an incident. So `Members` shares all but one chunk with the members
before a change, and knows how many ranks a phase still waits for. Read `Member` first, then `MemberFlag`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from itertools import chain, islice

from ttprun.recovery.events import ElasticDeclared, RankFrozen

CHUNK = 128


class GroupMembership(Enum):
    """A rank's connection with the others."""

    UNKNOWN = "unknown"  # it has neither taken a step nor made a process group
    JOINED = "joined"  # it has made a process group with others
    ALONE = "alone"  # it takes its steps without one


class Life(Enum):
    """The state of a rank."""

    LIVE = "live"  # a full member of the group: it may be a survivor and a source
    LOST = "lost"  # a fault ended its process or its script; its replacement has not caught up yet
    FINISHED = "finished"  # its script has reached its end
    AWAY = "away"  # it has no process, and the others train without it


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank: its process, and its answers in the current attempt.

    pid                 current process; None if there is none, or if we have killed it
    is_rerun            lost, but the process has survived the fault: it runs the script again as its own replacement
    is_protected        its hooks have reported
    membership          its connection with the others now
    has_joined          it has had a process group with others
    hindrance           why its current boundary (of a lost rank: its last) cannot be replayed, "" if it can
    spawn_asked_at_s    when a process was requested that has not started yet
    started_at_s        when its process started
    is_without_node     its node is lost, and it has not got a process on another one yet
    has_orders          a replacement that has its orders; a new attempt needs a new process
    elastic             its declaration, if it can continue in a smaller group
    frozen              answer to Freeze
    sent_digest         digest of StateSent; the source only
    repaired_digest     digest of RankRepaired; replacements only
    """

    rank: int
    pid: int | None = None
    life: Life = Life.LIVE
    is_rerun: bool = False
    is_protected: bool = False
    membership: GroupMembership = GroupMembership.UNKNOWN
    has_joined: bool = False
    hindrance: str = ""
    spawn_asked_at_s: float | None = None
    started_at_s: float | None = None
    is_without_node: bool = False
    has_orders: bool = False
    elastic: ElasticDeclared | None = None
    frozen: RankFrozen | None = None
    has_replayed: bool = False
    sent_digest: str | None = None
    repaired_digest: str | None = None
    has_rebuilt: bool = False
    has_reissued: bool = False

    @property
    def needs_process(self) -> bool:
        """Whether it is lost and needs a new process: one that has had orders may be anywhere in the script."""
        return self.life is Life.LOST and (self.pid is None or self.has_orders)

    @property
    def has_answers(self) -> bool:
        """Whether it has been given orders, or has answered, in the current attempt."""
        digests = (self.sent_digest, self.repaired_digest)
        has_any = self.has_orders or self.has_replayed or self.has_rebuilt or self.has_reissued
        return has_any or self.frozen is not None or digests != (None, None)

    def as_lost(self, at_s: float) -> Member:
        """The lost rank, whose new process was requested at that time."""
        place = Member(rank=self.rank, life=Life.LOST, spawn_asked_at_s=at_s)
        return replace(
            place, membership=self.membership, has_joined=self.has_joined, is_without_node=self.is_without_node
        )

    def with_answers_forgotten(self) -> Member:
        """The member, whose process is as it was, at the beginning of another attempt."""
        if not self.has_answers:
            return self
        return Member(
            rank=self.rank,
            pid=self.pid,
            life=self.life,
            is_rerun=self.is_rerun,
            is_protected=self.is_protected,
            membership=self.membership,
            has_joined=self.has_joined,
            hindrance=self.hindrance,
            spawn_asked_at_s=self.spawn_asked_at_s,
            is_without_node=self.is_without_node,
            elastic=self.elastic,
        )


class MemberFlag(IntEnum):
    """What is counted: the ranks of which this holds."""

    IS_LIVE = 0
    IS_LOST = 1
    IS_FINISHED = 2
    IS_AWAY = 3
    IS_QUIESCED = 4  # it has answered Freeze
    MUST_FREEZE = 5  # a survivor that has not
    MUST_START = 6  # a lost rank without a process
    MUST_REPLAY = 7  # a lost rank that has not
    MUST_LOAD = 8  # a lost rank that has no state yet
    MUST_CONNECT = 9  # it has not finished, and is not connected
    MUST_REISSUE = 10  # it has not finished, and has not caught up
    TRAINS_ALONE = 11
    HAS_JOINED = 12
    IS_HINDERED = 13
    IS_ELASTIC = 14
    IS_WITHOUT_NODE = 15


OF_LIFE = {
    Life.LIVE: MemberFlag.IS_LIVE,
    Life.LOST: MemberFlag.IS_LOST,
    Life.FINISHED: MemberFlag.IS_FINISHED,
    Life.AWAY: MemberFlag.IS_AWAY,
}


def flags_of(member: Member) -> list[MemberFlag]:
    """What holds of one rank."""
    if member.life is Life.LIVE:
        found = [MemberFlag.IS_LIVE] if member.frozen is not None else [MemberFlag.IS_LIVE, MemberFlag.MUST_FREEZE]
    elif member.life is Life.LOST:
        found = [MemberFlag.IS_LOST]
        if member.pid is None:
            found.append(MemberFlag.MUST_START)
        if not member.has_replayed:
            found.append(MemberFlag.MUST_REPLAY)
        if member.repaired_digest is None:
            found.append(MemberFlag.MUST_LOAD)
    else:
        found = [OF_LIFE[member.life]]
    if member.life is Life.LIVE or member.life is Life.LOST:
        if not member.has_rebuilt:
            found.append(MemberFlag.MUST_CONNECT)
        if not member.has_reissued:
            found.append(MemberFlag.MUST_REISSUE)
    if member.frozen is not None:
        found.append(MemberFlag.IS_QUIESCED)
    if member.membership is not GroupMembership.UNKNOWN:
        found.append(MemberFlag.TRAINS_ALONE if member.membership is GroupMembership.ALONE else MemberFlag.HAS_JOINED)
    if member.hindrance:
        found.append(MemberFlag.IS_HINDERED)
    if member.elastic is not None:
        found.append(MemberFlag.IS_ELASTIC)
    if member.is_without_node:
        found.append(MemberFlag.IS_WITHOUT_NODE)
    return found


class Members:
    """The members of a job in the order of ranks: it never changes, and a changed one shares almost all with it.

    counts   of each `MemberFlag`
    """

    __slots__ = ("_chunks", "counts")

    def __init__(self, chunks: tuple[tuple[Member, ...], ...], counts: list[int]) -> None:
        self._chunks = chunks
        self.counts = counts

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """These members, of rank 0, 1, ..."""
        waiting = iter(members)
        chunks = tuple(iter(lambda: tuple(islice(waiting, CHUNK)), ()))
        counts = [0] * len(MemberFlag)
        for flag in chain.from_iterable(map(flags_of, chain.from_iterable(chunks))):
            counts[flag] += 1
        return cls(chunks, counts)

    def with_changed(self, members: Iterable[Member]) -> Members:
        """All members, some of them exchanged."""
        chunks, counts = list(self._chunks), self.counts.copy()
        for member in members:
            number, place = divmod(member.rank, CHUNK)
            chunk = list(chunks[number])
            for flag in flags_of(chunk[place]):
                counts[flag] -= 1
            for flag in flags_of(member):
                counts[flag] += 1
            chunk[place] = member
            chunks[number] = tuple(chunk)
        return Members(tuple(chunks), counts)

    def with_each(self, change: Callable[[Member], Member]) -> Members:
        """All members, each of them changed."""
        changed = (after for before in self if (after := change(before)) is not before)
        return self.with_changed(changed)

    def __len__(self) -> int:
        return (len(self._chunks) - 1) * CHUNK + len(self._chunks[-1])

    def __iter__(self) -> Iterator[Member]:
        return chain.from_iterable(self._chunks)

    def __getitem__(self, rank: int) -> Member:
        return self._chunks[rank // CHUNK][rank % CHUNK]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and self._chunks == other._chunks

    def __hash__(self) -> int:
        return hash(self._chunks)

    def __repr__(self) -> str:
        return repr(tuple(self))
