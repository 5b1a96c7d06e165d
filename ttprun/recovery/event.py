"""What all events have: what has happened, in the past tense. Data only.

Every event carries `at_s`, seconds on a monotonic clock, stamped where the event came in: the machine has no clock.
Those that a rank sends about a repair carry the generation they belong to; `machine.is_echo` drops those of another.

For each rank the agent must keep the order of things: RankStarted before anything else of that process, then all that
the process has sent, then its RankExited. After KillRank nothing of that process may come but its RankExited. Between
ranks any order will do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened.

    at_s   seconds, monotonic, never less than that of the event before
    """

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent(Event):
    """Something happened to one rank.

    rank   0 .. world_size - 1
    """

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairEvent(RankEvent):
    """A rank reports on a repair.

    generation   that of the order which the rank has carried out
    """

    generation: int
