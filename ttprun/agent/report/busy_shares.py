"""Which ranks the others wait for: of each, how often it is seen at work instead of waiting.

In a job whose ranks wait for each other all take the same time for a step; the slow one is the one that waits least.
What is counted is on the board anyway, so a rank is not asked, and its code is not measured. A rank that computes while
its collectives are under way, as DDP's do, counts as waiting: shares of different ranks can be compared, and say
nothing alone.
"""

from __future__ import annotations

from ttprun.protocol.board import Phase

LEAST_LOOKS = 60  # before a share is worth a word: half a minute
MOST_LOOKS = 240  # what lies further back counts less and less
_WAITING = frozenset((Phase.COLLECTIVE, Phase.WAITING, Phase.COMMITTING, Phase.CONNECTING))


class BusyShares:
    """Counts what is seen at each look."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._shares: dict[int, float] = {}

    def note(self, rank: int, phase: Phase) -> None:
        """A rank was seen while all train."""
        looks = self._looks[rank] = min(MOST_LOOKS, self._looks.get(rank, 0) + 1)
        share = self._shares.get(rank, 0.0)
        self._shares[rank] = share + ((phase not in _WAITING) - share) / looks

    def share(self, rank: int) -> float | None:
        """From 0 to 1; None: too little was seen."""
        return round(self._shares[rank], 3) if self._looks.get(rank, 0) >= LEAST_LOOKS else None
