"""The ranks of a job: one `Member` each, and all of them with counts, by which an event is answered without a scan.

A job of 16,384 ranks hears three answers of each in an incident. So `Members` shares all but one chunk with the members
before a change, and knows how many ranks a phase still waits for. Read `Member` first, then `COUNTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, islice
from typing import Any, TypeVar

from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.meeting import GroupMembership
from ttprun.protocol.reason import Reason
from ttprun.recovery.job_events import ElasticDeclared

T = TypeVar("T")


def changed(instance: T, **changes: Any) -> T:
    """A copy with some fields changed, of a dataclass without slots. AttributeError if it has no such field."""
    before = vars(instance)
    after = before | changes
    if len(after) != len(before):
        raise AttributeError(f"{type(instance).__name__} has no {', '.join(changes.keys() - before.keys())}")
    made = object.__new__(type(instance))
    object.__setattr__(made, "__dict__", after)
    return made


CHUNK = 128


class RankState(Enum):
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
    hindrance           why its current boundary (of a lost rank: its last) cannot be replayed, none if it can
    spawn_asked_at_s    when a process was requested that has not started yet
    started_at_s        when its process started
    is_without_node     its node is lost, and it has not got a process on another one yet
    has_orders          a replacement that has its orders; a new attempt needs a new process
    elastic             its declaration, if it can continue in a smaller group
    frozen              answer to Freeze
    sends_to            lost ranks that it was ordered to send its state
    sent_digest         digest of StateSent; the source only
    repaired_digest     digest of RankRepaired; replacements only
    """

    rank: int
    pid: int | None = None
    life: RankState = RankState.LIVE
    is_rerun: bool = False
    is_protected: bool = False
    membership: GroupMembership = GroupMembership.UNKNOWN
    has_joined: bool = False
    hindrance: Reason = Reason()
    spawn_asked_at_s: float | None = None
    started_at_s: float | None = None
    is_without_node: bool = False
    has_orders: bool = False
    elastic: ElasticDeclared | None = None
    frozen: RankFrozen | None = None
    has_replayed: bool = False
    sends_to: tuple[int, ...] = ()
    sent_digest: str | None = None
    repaired_digest: str | None = None
    has_rebuilt: bool = False
    has_reissued: bool = False

    @property
    def needs_process(self) -> bool:
        """Whether it is lost and needs a new process: one that has had orders may be anywhere in the script."""
        return self.life is RankState.LOST and (self.pid is None or self.has_orders)

    @property
    def has_answers(self) -> bool:
        """Whether it has been given orders, or has answered, in the current attempt."""
        digests = (self.sent_digest, self.repaired_digest)
        has_any = self.has_orders or self.has_replayed or self.has_rebuilt or self.has_reissued
        return has_any or self.frozen is not None or bool(self.sends_to) or digests != (None, None)

    def as_lost(self, at_s: float) -> Member:
        """The lost rank, whose new process was requested at that time."""
        place = Member(rank=self.rank, life=RankState.LOST, spawn_asked_at_s=at_s)
        return replace(
            place, membership=self.membership, has_joined=self.has_joined, is_without_node=self.is_without_node
        )

    def with_answers_forgotten(self) -> Member:
        """The member, whose process is as it was, at the beginning of another attempt."""
        if not self.has_answers:
            return self
        return changed(
            self,
            started_at_s=None,
            has_orders=False,
            frozen=None,
            has_replayed=False,
            sends_to=(),
            sent_digest=None,
            repaired_digest=None,
            has_rebuilt=False,
            has_reissued=False,
        )


# Looking up an enum's member takes longer than all else that is done with it here.
_LIVE, _LOST, _ALONE, _JOINED = RankState.LIVE, RankState.LOST, GroupMembership.ALONE, GroupMembership.JOINED
# What is counted: name -> whether it holds of a member.
COUNTED: dict[str, Callable[[Member], bool]] = {
    "live": lambda member: member.life is _LIVE,
    "lost": lambda member: member.life is _LOST,
    "finished": lambda member: member.life is RankState.FINISHED,
    "away": lambda member: member.life is RankState.AWAY,
    "quiesced": lambda member: member.frozen is not None,
    "must freeze": lambda member: member.life is _LIVE and member.frozen is None,
    "must start": lambda member: member.life is _LOST and member.pid is None,
    "must replay": lambda member: member.life is _LOST and not member.has_replayed,
    "must load": lambda member: member.life is _LOST and member.repaired_digest is None,
    "must send": lambda member: bool(member.sends_to) and member.sent_digest is None,
    "must connect": lambda member: not member.has_rebuilt and (member.life is _LIVE or member.life is _LOST),
    "must reissue": lambda member: not member.has_reissued and (member.life is _LIVE or member.life is _LOST),
    "trains alone": lambda member: member.membership is _ALONE,
    "has joined": lambda member: member.membership is _JOINED,
    "hindered": lambda member: member.hindrance.text != "",
    "elastic": lambda member: member.elastic is not None,
    "without node": lambda member: member.is_without_node,
}


class Members:
    """The members of a job in the order of ranks: it never changes, and a changed one shares almost all with it."""

    __slots__ = ("_chunks", "_counts")

    def __init__(self, chunks: tuple[tuple[Member, ...], ...], counts: dict[str, int]) -> None:
        """`counts` as in `COUNTED`."""
        self._chunks = chunks
        self._counts = counts

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """These members, of rank 0, 1, ..."""
        waiting = iter(members)
        chunks = tuple(iter(lambda: tuple(islice(waiting, CHUNK)), ()))
        members = [*chain.from_iterable(chunks)]
        return cls(chunks, {what: sum(map(holds, members)) for what, holds in COUNTED.items()})

    def count(self, what: str) -> int:
        """How many ranks this holds of; `what` of `COUNTED`."""
        return self._counts[what]

    def with_changed(self, members: Iterable[Member]) -> Members:
        """All members, some of them exchanged."""
        chunks, counts = list(self._chunks), self._counts.copy()
        opened: dict[int, list[Member]] = {}
        for member in members:
            number, place = divmod(member.rank, CHUNK)
            chunk = opened.get(number)
            if chunk is None:
                chunk = opened[number] = list(chunks[number])
            before = chunk[place]
            for what, holds in COUNTED.items():
                if (does := holds(member)) is not holds(before):
                    counts[what] += 1 if does else -1
            chunk[place] = member
        for number, chunk in opened.items():
            chunks[number] = tuple(chunk)
        return Members(tuple(chunks), counts)

    def with_each(self, change: Callable[[Member], Member]) -> Members:
        """All members, each of them changed."""
        return self.with_changed(after for before in self if (after := change(before)) is not before)

    def __len__(self) -> int:
        return (len(self._chunks) - 1) * CHUNK + len(self._chunks[-1])

    def __iter__(self) -> Iterator[Member]:
        return chain.from_iterable(self._chunks)

    def __getitem__(self, rank: int) -> Member:
        return self._chunks[rank // CHUNK][rank % CHUNK]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and self._counts == other._counts and self._chunks == other._chunks

    def __hash__(self) -> int:
        return hash(self._chunks)

    def __repr__(self) -> str:
        return repr(tuple(self))
