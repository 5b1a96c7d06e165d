"""What the ranks hold that can change and is in no record: named after the first step, and with each incident."""

from __future__ import annotations

import logging

from ttprun.recovery import Incident

logger = logging.getLogger(__name__)
_REPLAYED_BY_ALL = frozenset({"rewind", "restart", "resize"})


class NotProved:
    """What each rank has said, in its own words: "cache (sqlite3.Connection): it is in a file"."""

    def __init__(self) -> None:
        self._of_ranks: dict[int, tuple[str, ...]] = {}
        self._of_incidents: dict[int, tuple[str, ...]] = {}
        self._said: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ranks, each name once."""
        return self._names_of(tuple(sorted(self._of_ranks)))

    def take(self, rank: int, names: tuple[str, ...]) -> None:
        """A rank has met such objects; the console gets each name once."""
        self._of_ranks[rank] = names
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new:
            logger.warning("not proved: %s; a replacement has these as the script's set-up makes them", "; ".join(new))

    def note_incident(self, incident: Incident) -> None:
        """An incident has gone on: what of its replays is not proved stays with it, whatever comes later."""
        ranks = tuple(self._of_ranks) if incident.rung in _REPLAYED_BY_ALL else incident.ranks
        if incident.rung != "reconnect" and incident.outcome in ("open", "recovered"):
            self._of_incidents[incident.id] = self._names_of(ranks)

    def of_incident(self, number: int) -> tuple[str, ...]:
        """What is not proved of the ranks that an incident has replaced."""
        return self._of_incidents.get(number, ())

    def _names_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for rank in ranks for name in self._of_ranks.get(rank, ())))
