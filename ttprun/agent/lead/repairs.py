"""How lost ranks get their state back: what the machine's orders come to in the ranks.

By default a replacement runs the script in replay up to the boundary that the survivors hold, and gets their weights
there (`Replays`); if something was equal to rounding alone, it is planned whose gradients count (`plan_alignment`; the
ranks' part, and why: ttprun/rank/proof.py). With `--mindio` the ranks answer by callbacks of their framework
(`ttprun/mindio`). Where no survivor can give the state, ranks go back to what was stored of them: a snapshot, a
checkpoint, or what one that is alone keeps of itself (`Rewinds`).
"""

from __future__ import annotations

import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs
from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base.stored_states import UNUSABLE, Stored
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.resume import Resumption
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.groups.agreement import Agreed, Operation, expected_of
from ttprun.protocol import from_rank, mindio, process_orders, to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.rank_events import MismatchFound
from ttprun.protocol.reason import Reason


class Repairs(ABC):
    """Carries out the orders that the two ways carry out differently, and takes what only one's ranks report."""

    # Whoever has nothing to do then leaves these as they are.

    @property
    def is_paused(self) -> bool:
        """All ranks wait on purpose: nobody is expected to get on."""
        return False

    def look(self) -> None:  # noqa: B027
        """Time has passed."""

    def note_incident(self, incident: recovery.Incident) -> None:  # noqa: B027
        """How an incident stands."""

    def repair_type(self) -> mindio.Strategy | None:
        """What the recovery that has just begun comes to, as a framework's handlers are given it; None without one."""
        return None

    def expect(self, lost: Sequence[int]) -> None:  # noqa: B027
        """Lost ranks are to be repaired: they are waited for again, if they were away."""

    def call_back(self, reason: str) -> str:
        """Have the ranks that are away train again; returns why they cannot, "" if they are on their way.

        reason   who has asked
        """
        return "no rank is away"

    # Orders.

    @abstractmethod
    def replay(self, action: to_rank.Replay) -> None:
        """Have a replacement set itself up as far as the boundary."""

    @abstractmethod
    def send_state(self, action: to_rank.SendState) -> None:
        """Have ranks pass state over to the replacements."""

    def load_mirror(self, action: to_rank.LoadMirror) -> None:
        """Have a replacement load what its rank had mirrored."""
        raise NotImplementedError("a framework keeps no mirrors")

    @abstractmethod
    def resume(self, action: to_rank.Resume) -> None:
        """Have all ranks connect, and go on."""

    @abstractmethod
    def persist(self, action: recovery.Persist) -> None:
        """Have the survivors, who are all quiesced, write a checkpoint; the answer is StatePersisted."""

    # Reports.

    def take(self, slot: Row, message: mindio.Report | from_rank.OfAlignment) -> None:  # noqa: B027
        """A rank reports what only one of the two ways of repair is concerned with."""


Journals = Mapping[int, Mapping[str, GroupJournal]]


def plan_alignment(
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
        used = {  # (group, number) -> members, of what each rank has completed and cannot be given to the others
            rank: {
                (name, number): group.ranks
                for name, group in journals.get(rank, {}).items()
                for number in group.taken
                if (name, number) not in shared
            }
            for rank in ranks
            if rank not in gone
        }
        source = max(used, key=lambda rank: (len(used[rank]), -rank), default=None)
        if source is None or not any(used.values()):
            continue
        for rank in ranks:
            theirs = used.get(rank, {})
            differing = used[source].keys() ^ theirs.keys()
            if any({source, rank} <= {*(used[source].get(which) or theirs[which])} for which in differing):
                sources[rank] = source
    return sources


class Alignments:
    """Has gradients passed on when a replacement asks for that.

    meeting_place   the path of a socket of this name
    """

    def __init__(self, node: Lead, meeting_place: Callable[[str], str]) -> None:
        self._node = node
        self._meeting_place = meeting_place
        self._sources: dict[int, int] = {}
        self._under_way: dict[tuple[int, int], set[int]] = {}  # (boundary, source) -> ranks that have not taken them

    def begin(self, sources: dict[int, int]) -> None:
        """All resume; `sources` is what `plan_alignment` has found."""
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


@dataclass
class Replays(Repairs):
    """Repairs the ranks of a node by replay."""

    _node: Lead
    _wire: Wire
    _comparisons: Comparisons
    _checkpoints: Checkpoints
    _elsewhere: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)
    _alignments: Alignments = field(init=False)

    def __post_init__(self) -> None:
        self._alignments = Alignments(self._node, self._meeting_place)

    def replay(self, action: to_rank.Replay) -> None:
        """Order a replacement up to where to run the script; its node compares its record with that of its source."""
        node = self._node
        slot = node.slots[action.rank]
        stored = slot.stored
        if action.source is None and stored is not None and stored.of_others is not None:
            slot.send(replace(action, adapt=to_rank.Adapt(stored.of_others, node.config.resume_hyperparameters)))
            return
        if action.source == action.rank and slot.divergence:
            node.report_mismatch(
                action.rank,
                action.generation,
                Reason("state-of-one-rank", f"rank {action.rank} has diverged, and its mirror holds the same"),
            )
            return
        source, peers = action.source, None
        if source is not None and source != action.rank and not slot.divergence:
            peers = node.slots[source].fingerprints.get(action.boundary, "")
        is_before_step = node.job.replicas.has_collective_steps
        filled = {"is_contradicted": node.job.is_contradicted, "is_before_step": is_before_step}
        self._wire.order(action.rank, replace(action, fingerprint=peers, **filled))

    def send_state(self, action: to_rank.SendState) -> None:
        """Have the source and the replacements pass the state over."""
        node = self._node
        self._comparisons.note_repair(action.to, action.boundary)
        name = self._meeting_place(f"state-{action.generation}-{action.source}.sock")
        limit_s = node.config.transfer_timeout_s
        node.slots[action.source].send(replace(action, name=name, limit_s=limit_s))
        for rank in action.to:
            node.slots[rank].send(to_rank.FetchState(action.generation, name, limit_s))

    def _meeting_place(self, name: str) -> str:
        """A socket's path, from the run's directory; elsewhere if nothing can be made there any more."""
        if os.access(self._node.run.path, os.W_OK):
            return name
        if self._elsewhere is None:
            self._elsewhere = tempfile.TemporaryDirectory(prefix="ttprun-", ignore_cleanup_errors=True)
        return os.path.join(self._elsewhere.name, name)

    def load_mirror(self, action: to_rank.LoadMirror) -> None:
        """Have a replacement load what its rank had mirrored, if it has not done so before its step."""
        self._comparisons.note_repair((action.rank,), action.boundary)
        is_before_step = self._node.job.replicas.has_collective_steps
        self._wire.order(action.rank, replace(action, is_before_step=is_before_step))

    def resume(self, action: to_rank.Resume) -> None:
        """Have all ranks connect and issue their journals again."""
        slots = self._node.slots
        journals = {slot.rank: slot.journal for slot in slots if slot.journal}
        agreed, expected = Agreed.of_each(action.ranks, journals), expected_of(journals.values())
        given = next((agreement.sources for agreement in agreed.values()), {})  # the same for all
        takes_from = self._whose_gradients(action, journals, given)
        self._alignments.begin(takes_from)
        for rank in action.ranks:
            resume = replace(
                action,
                ranks=(),
                expected=expected.get(rank, {}),
                sources=[(name, number, giver) for (name, number), giver in agreed[rank].sources.items()],
                received=agreed[rank].received,
                settled=agreed[rank].settled,
                takes_from=takes_from.get(rank),
            )
            slots[rank].send(resume)

    def _whose_gradients(
        self, action: to_rank.Resume, journals: Mapping[int, dict[str, GroupJournal]], given: Collection[Operation]
    ) -> dict[int, int]:
        """See `plan_alignment`. A collective step is taken with the other ranks, after the boundary."""
        job = self._node.job
        if job.replicas.has_collective_steps or job.settings.are_replicas_declared:
            return {}
        return plan_alignment(journals, given, job.replicas.alike(action.ranks), job.lost)

    def take(self, slot: Row, message: mindio.Report | from_rank.OfAlignment) -> None:
        """A replacement asks for gradients, or a rank has taken them."""
        match message:
            case from_rank.Unaligned():
                self._alignments.ask(slot.rank, message)
            case from_rank.Aligned():
                self._alignments.note(slot.rank, message)

    def persist(self, action: recovery.Persist) -> None:
        """Write a checkpoint of what the survivors hold."""
        self._checkpoints.persist(action)


logger = logging.getLogger("ttprun")


@dataclass
class Rewinds:
    """Takes ranks back, on whatever nodes they are."""

    _node: Lead
    _wire: Wire
    _resumption: Resumption
    _comparisons: Comparisons
    _snapshots: Snapshots
    _checkpoints: Checkpoints

    def rewind(self, action: process_orders.Rewind) -> None:
        """Put what was stored of ranks in the place of what they have recorded since; they have no process now."""
        node = self._node
        if len(action.ranks) == len(node.slots):
            node.board.set(LEADER, Field.SNAPSHOT_AT, 0)
            node.board.set(LEADER, Field.OPEN_AT, 0)
        try:
            stored = self._stored(action)
        except UNUSABLE as error:
            node.refuse_stored(action.ranks[0], node.job.generation, error)
            return
        by_node: dict[int, list[int]] = {}
        for rank in action.ranks:
            node.slots[rank].stored = stored
            by_node.setdefault(node.peers.node_of(rank), []).append(rank)
        is_adapted = stored is not None and stored.of_others is not None
        for number, ranks in by_node.items():
            trusted = tuple(rank for rank in ranks if self._is_trusted(node.slots[rank]))
            filled = {"generation": node.job.generation, "is_adapted": is_adapted, "trusted": trusted}
            self._wire.order_on(number, structs.replace(action, ranks=tuple(ranks), **filled))

    def _stored(self, action: process_orders.Rewind) -> Stored | None:
        """What the ranks go back to; None: they begin anew. Raises if it cannot be used."""
        if not action.boundary:
            return None
        if action.place:
            return self._resumption.opened(action.place)
        if action.is_own:
            stored = self._node.eyes.stored(action.ranks[0], action.boundary)
        else:
            stored = None if self._snapshots.newest is None else self._snapshots.newest.as_stored()
        if stored is None or stored.boundary != action.boundary:
            raise LookupError(f"there is no snapshot of step {action.boundary} any more")
        return stored

    def save(self, order: recovery.Persist) -> None:
        """No rank lives that could write a checkpoint: write what is kept of them in shared memory."""
        try:
            stored = self._stored(process_orders.Rewind((0,), order.boundary, is_own=order.is_own))
            if stored is None:
                raise LookupError(f"nothing is kept of step {order.boundary}")
        except UNUSABLE as error:
            self._checkpoints.fail(order, str(error))
        else:
            self._checkpoints.save(order, stored)

    def note_unusable(self, action: recovery.NoteUnusable) -> None:
        """Keep the next launch from the same failure."""
        self._node.log("checkpoint_unusable", place=action.place, reason=action.reason)
        if action.is_refused:
            logger.warning("the same command and files do not resume from '%s' again: %s", action.place, action.reason)
        self._resumption.note_unusable(action.place, action.reason, action.is_refused)

    def _is_trusted(self, slot: Row) -> bool:
        """Whether what a rank has done since is what it must do again: nothing says that its state was wrong."""
        incident = self._node.job.incident
        untrusted = (MismatchFound.kind, recovery.StepDiffers.kind)
        return not slot.divergence and (incident is None or incident.kind not in untrusted)

    def load_state(self, action: to_rank.LoadState) -> None:
        """Have ranks load what replicas share."""
        slots = self._node.slots
        if len(action.ranks) == len(slots):
            self._comparisons.note_repair(action.ranks, action.boundary)
        for rank in action.ranks:
            stored = slots[rank].stored
            assert stored is not None
            owners = {key: list(ranks) for key, ranks in stored.owners.items()}
            filled = {"files": stored.files, "owners": owners, "header": stored.header_of(rank)}
            slots[rank].send(structs.replace(action, ranks=(), **filled))
