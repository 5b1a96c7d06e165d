"""What has never changed is looked at in turns: the one schedule of all that is too much to look at at each boundary.

All of a thing is looked at until it was the same LOOKS times, and from then on a part of it, the one that was looked at
least recently. Things share the time of a boundary: at most PARTS parts of all of them are looked at. Begin with
`Turns.due`.
"""

from __future__ import annotations

LOOKS = 3  # whole looks in a row that have found nothing, before turns begin
PARTS = 4  # that are looked at at a boundary, of all things; each takes some 50 microseconds
ALL, NOTHING = -1, -2  # in place of the number of a part


class Clock:
    """What all that is looked at in turns follows.

    boundary   number of the boundary, of all in this process
    records    that this run of the script has begun
    is_whole   nothing is left to its turn: what is recorded now is needed for more than evidence covers
    asking     things in turns that have asked at this boundary so far
    asked      the same of the boundary before
    """

    boundary = records = asking = asked = 0
    is_whole = False

    @classmethod
    def advance(cls) -> None:
        """The next boundary begins."""
        cls.boundary += 1
        cls.asked, cls.asking = cls.asking, 0


class Turns:
    """Which part of one thing is to be looked at."""

    __slots__ = ("_asked_at", "_looks", "_next", "_seen")

    def __init__(self) -> None:
        self._looks = self._next = 0
        self._asked_at = -1  # in turns
        self._seen: list[int] = []  # the boundary at which each part was looked at

    def due(self, parts: int) -> int:
        """ALL, the number of one of so many parts, or NOTHING: what to look at now. `note` is to be called then."""
        if self._looks < LOOKS or Clock.is_whole or parts <= 1:
            return ALL
        if self._asked_at == Clock.boundary:
            return NOTHING
        self._asked_at = Clock.boundary
        place, Clock.asking = Clock.asking, Clock.asking + 1
        if len(self._seen) == 1:
            self._seen, self._next = self._seen * parts, 0
        self._seen += [Clock.boundary] * (parts - len(self._seen))  # what was added was looked at for it
        every = -(-Clock.asked // PARTS) or 1
        return self._next if (Clock.boundary + place) % every == 0 else NOTHING

    def note(self, due: int, is_same: bool) -> bool:
        """What was due has been looked at. Returns `is_same`."""
        if not is_same:
            self._looks, self._seen = 0, []
        elif due == ALL:
            self._looks += self._seen != [Clock.boundary]
            self._seen = [Clock.boundary]
        elif due != NOTHING:
            self._seen[due] = Clock.boundary
            self._next = (due + 1) % len(self._seen)
        return is_same

    @property
    def age(self) -> int:
        """How many boundaries ago each part was looked at, at most."""
        return Clock.boundary - min(self._seen) if self._seen else 0
