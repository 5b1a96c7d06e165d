"""Ranks go back to what was stored of them: a snapshot, a checkpoint, or what one that is alone keeps of itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from msgspec import structs

from ttprun import recovery
from ttprun.agent.launcher.resume import Resumption
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.row import Row
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.agent.lead.wire import Wire
from ttprun.agent.node.node import Node, refuse_stored
from ttprun.agent.node.own_states import OwnStates
from ttprun.agent.node.stored_states import UNUSABLE, Stored
from ttprun.protocol import process_orders, to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.rank_events import MismatchFound

logger = logging.getLogger("ttprun")


@dataclass
class Rewinds:
    """Takes ranks back, on whatever nodes they are."""

    _node: Node
    _wire: Wire
    _resumption: Resumption
    _comparisons: Comparisons
    _snapshots: Snapshots
    _own_states: OwnStates
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
            refuse_stored(node, action.ranks[0], node.job.generation, error)
            return
        by_node: dict[int, list[int]] = {}
        for rank in action.ranks:
            node.slots[rank].rewind_to(stored)
            by_node.setdefault(node.peers.node_of(rank), []).append(rank)
        is_adapted = stored is not None and stored.origin is not None
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
        own = None
        if recovery.is_alone(self._node.job, action.ranks[0]):
            own = self._own_states.stored(action.ranks[0], action.boundary)
        if own is not None:
            return own
        newest = self._snapshots.newest
        if newest is None or newest.boundary != action.boundary:
            raise LookupError(f"there is no snapshot of step {action.boundary} any more")
        return newest.as_stored()

    def save(self, order: recovery.Persist) -> None:
        """No rank lives that could write a checkpoint: write what is kept of them in shared memory."""
        ranks = tuple(range(len(self._node.slots)))
        try:
            stored = self._stored(process_orders.Rewind(ranks, order.boundary))
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
        return not slot.divergence and (incident is None or incident.kind != MismatchFound.kind)

    def load_state(self, action: to_rank.LoadState) -> None:
        """Have ranks load what replicas share."""
        slots = self._node.slots
        if len(action.ranks) == len(slots):
            self._comparisons.note_repair(action.ranks, action.boundary)
        for rank in action.ranks:
            stored = slots[rank].stored
            assert stored is not None
            owners = {key: list(ranks) for key, ranks in stored.replicas.differing.items()}
            filled = {"files": stored.files, "owners": owners, "header": stored.header_of(rank)}
            slots[rank].send(structs.replace(action, ranks=(), **filled))
