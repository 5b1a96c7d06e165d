"""Whose gradients count after a repair, if something was equal to rounding alone. Begin with `plan`.

The ranks' part, and why: ttprun/rank/checks/alignment.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ttprun.agent.core.node import Node
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.from_rank import GroupJournal

Journals = Mapping[int, Mapping[str, GroupJournal]]


def plan(
    journals: Journals, given: Iterable[tuple[str, int]], alike: Iterable[tuple[int, ...]], lost: Iterable[int]
) -> dict[int, int]:
    """Rank -> the survivor whose results of the step count for it, if sums that it gets anew come to other bits.

    journals   rank -> group -> what a survivor has issued
    given      (group, number) of the collectives whose results are given to all
    alike      ranks that hold the same, together
    lost       ranks that are replaced

    Of ranks that hold the same the one counts that has used most of the results that nobody has any more.
    """
    sources: dict[int, int] = {}
    shared, gone = {*given}, {*lost}
    for ranks in alike:
        used = {rank: _used_by(journals.get(rank, {}), shared) for rank in ranks if rank not in gone}
        source = max(used, key=lambda rank: (len(used[rank]), -rank), default=None)
        if source is None or not any(used.values()):
            continue
        for rank in ranks:
            theirs = used.get(rank, {})
            differing = used[source].keys() ^ theirs.keys()
            if any({source, rank} <= {*(used[source].get(which) or theirs[which])} for which in differing):
                sources[rank] = source
    return sources


def _used_by(journal: Mapping[str, GroupJournal], given: set[tuple[str, int]]) -> dict[tuple[str, int], list[int]]:
    """(group, number) -> members, of what a rank has completed and cannot be given to the others."""
    return {
        (name, number): group.ranks
        for name, group in journal.items()
        for number in group.taken
        if (name, number) not in given
    }


class Alignments:
    """Has gradients passed on when a replacement asks for that.

    meeting_place   the path of a socket of this name
    """

    def __init__(self, node: Node, meeting_place: Callable[[str], str]) -> None:
        self._node = node
        self._meeting_place = meeting_place
        self._sources: dict[int, int] = {}
        self._under_way: dict[tuple[int, int], set[int]] = {}  # (boundary, source) -> ranks that have not taken them

    def begin(self, sources: dict[int, int]) -> None:
        """All resume; `sources` is what `plan` has found."""
        self._sources, self._under_way = sources, {}

    def ask(self, rank: int, message: from_rank.Unaligned) -> None:
        """A replacement waits for gradients: its source sends them to all that take them from it."""
        source, boundary = self._sources.get(rank), message.boundary
        if message.generation != self._node.job.generation:
            return  # it asks again when all have resumed
        if source is None:
            self._node.slots[rank].send(to_rank.GoOn(boundary))
            return
        if (boundary, source) in self._under_way:
            return
        takers = {taker for taker, of in self._sources.items() if of == source}
        self._under_way[boundary, source] = takers
        name = self._meeting_place(f"gradients-{message.generation}-{boundary}-{source}.sock")
        generation, limit_s = message.generation, self._node.config.transfer_timeout_s
        self._node.log("gradients_asked", generation=generation, boundary=boundary, source=source, to=sorted(takers))
        self._node.slots[source].send(to_rank.SendGradients(generation, boundary, name, limit_s, len(takers)))
        for taker in takers:
            self._node.slots[taker].send(to_rank.TakeGradients(generation, boundary, name, limit_s, source))

    def note(self, rank: int, message: from_rank.Aligned) -> None:
        """A rank has taken the gradients; after the last one all go on."""
        source, boundary = self._sources.get(rank), message.boundary
        if message.generation != self._node.job.generation or source is None:
            return
        pending = self._under_way.get((boundary, source), set())
        pending.discard(rank)
        if not pending:
            for taker in (taker for taker, of in self._sources.items() if of == source):
                self._node.slots[taker].send(to_rank.GoOn(boundary))
