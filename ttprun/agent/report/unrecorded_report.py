"""What the ranks hold that can change and is in no record: named after the first step, and with each incident."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from ttprun.protocol.reasons import pointer
from ttprun.recovery import Incident

logger = logging.getLogger(__name__)
COST_OF_UNRECORDED = "If a rank is lost before the first loss of its step, it is not replaced"
_REPLAYED_BY_ALL = frozenset({"rewind", "restart", "resize"})
_VARIABLE = re.compile(r"(?:rank \d+: )?(?:a key of )*((?:[\w.<>]+: )*\w+)(?=[.\[]| \()")


def grouped(sentences: Iterable[str]) -> list[str]:
    """Sentences that begin with a variable's path, for the console: of several about one variable, only the first."""
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(path[1] if (path := _VARIABLE.match(sentence)) else sentence, []).append(sentence)
    return [
        group[0] if len(group) == 1 else f"{variable}: {len(group)} things in it (ttprun status), such as {group[0]}"
        for variable, group in groups.items()
    ]


class NotProved:
    """What each rank has said, in its own words: "cache (sqlite3.Connection): it is in a file"."""

    def __init__(self) -> None:
        self._of_ranks: dict[int, tuple[str, ...]] = {}
        self._unrecorded: dict[int, tuple[str, ...]] = {}
        self._of_incidents: dict[int, tuple[str, ...]] = {}
        self._said: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ranks, each name once."""
        return self._names_of(self._ranks)

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """What of all ranks no replay could restore, a sentence each."""
        return tuple(
            dict.fromkeys(sentence for rank in sorted(self._unrecorded) for sentence in self._unrecorded[rank])
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._of_ranks.keys() | self._unrecorded.keys()))

    def take(self, rank: int, sentences: tuple[str, ...], is_unrecorded: bool = False) -> None:
        """A rank has met such objects; the console gets each once.

        is_unrecorded   it could not restore them
        """
        (self._unrecorded if is_unrecorded else self._of_ranks)[rank] = sentences
        new = [sentence for sentence in sentences if sentence not in self._said]
        self._said.update(new)
        for name in [name for name in new if name.endswith("written again")]:
            new.remove(name)
            logger.warning("if a rank is replaced: %s%s", name, pointer(name))
        if new:
            said = f"not proved: {'; '.join(grouped(new))}"
            if is_unrecorded:
                logger.warning("%s%s. %s", said, pointer(said), COST_OF_UNRECORDED)
            else:
                logger.warning("%s; a replacement has these as the script's set-up makes them%s", said, pointer(said))

    def note_incident(self, incident: Incident) -> None:
        """An incident has gone on: what of its replays is not proved stays with it, whatever comes later."""
        ranks = self._ranks if incident.rung in _REPLAYED_BY_ALL else incident.ranks
        if incident.rung != "reconnect" and incident.outcome in ("open", "recovered"):
            self._of_incidents[incident.id] = self._names_of(ranks)

    def of_incident(self, number: int) -> tuple[str, ...]:
        """What is not proved of the ranks that an incident has replaced."""
        return self._of_incidents.get(number, ())

    def _names_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        listed = (names for rank in ranks for names in (self._of_ranks.get(rank, ()), self._unrecorded.get(rank, ())))
        return tuple(dict.fromkeys(name for names in listed for name in names))
