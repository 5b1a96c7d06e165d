"""Ranks go back to what was stored of them: a snapshot, a checkpoint, or what one that is alone keeps of itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from ttprun import recovery
from ttprun.agent.checkpoints.snapshots import Snapshots
from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.launcher.resume import Resumption
from ttprun.agent.repair.comparisons import Comparisons
from ttprun.agent.repair.mirrors import Mirrors
from ttprun.agent.repair.own_state import OwnStates
from ttprun.agent.repair.stored_states import Origin, Stored, open_checkpoint
from ttprun.errors import ConfigError
from ttprun.protocol import nodes, to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.rank.records.recorder import RecordTooLargeError
from ttprun.state.checkpoint import inspect
from ttprun.state.errors import InvalidCheckpointError

logger = logging.getLogger("ttprun")


class Rewinds:
    """Takes a node's ranks back."""

    def __init__(
        self,
        node: Node,
        resumption: Resumption,
        comparisons: Comparisons,
        snapshots: Snapshots,
        own_states: OwnStates,
        mirrors: Mirrors,
    ) -> None:
        self._node = node
        self._resumption = resumption
        self._comparisons = comparisons
        self._snapshots = snapshots
        self._own_states = own_states
        self._mirrors = mirrors

    def rewind(self, action: recovery.Rewind) -> None:
        """Put what was stored of ranks in the place of what they have recorded since; they have no process now."""
        node = self._node
        if len(action.ranks) == len(node.slots):
            node.board.set(LEADER, Field.SNAPSHOT_AT, 0)
            node.board.set(LEADER, Field.OPEN_AT, 0)
        slot = node.slots[action.ranks[0]]
        try:
            stored = self._stored(action)
            for slot in (node.slots[rank] for rank in action.ranks):
                slot.stored = stored
                self._go_back(slot, stored)
            self._order_elsewhere(action)
        except (ConfigError, InvalidCheckpointError, RecordTooLargeError, LookupError, ValueError) as error:
            event = recovery.MismatchFound(
                at_s=time.monotonic(),
                rank=slot.rank,
                generation=node.job.generation,
                reason=f"its stored state cannot be used: {error}",
            )
            node.advance(event)

    def _order_elsewhere(self, action: recovery.Rewind) -> None:
        """The agents of other nodes do the same for theirs."""
        node, by_node = self._node, dict[int, list[int]]()
        for rank in action.ranks:
            if not node.slots[rank].is_here:
                by_node.setdefault(node.peers.node_of(rank), []).append(rank)
        for ranks in by_node.values():
            stored = node.slots[ranks[0]].stored
            is_adapted = stored is not None and stored.origin is not None
            order = nodes.GoBack(ranks, node.job.generation, action.boundary, action.place, is_adapted)
            node.peers.to_node_of(ranks[0], order)

    def go_back_here(self, order: nodes.GoBack) -> str:
        """The agent that leads orders it for ranks of this node; returns why it cannot be done, or ""."""
        try:
            stored = open_checkpoint(inspect(Path(order.place)), 0.0) if order.place else None
            if stored is not None and order.is_adapted:
                stored = replace(stored, origin=Origin(0, ()))  # from whom each takes over, the leader says
            for slot in (self._node.slots[rank] for rank in order.ranks):
                slot.stored = stored
                self._go_back(slot, stored)
        except (ConfigError, InvalidCheckpointError, RecordTooLargeError, LookupError, ValueError) as error:
            return f"its stored state cannot be used: {error}"
        return ""

    def _stored(self, action: recovery.Rewind) -> Stored | None:
        """What the ranks go back to; None: they begin anew. Raises if it cannot be used."""
        if not action.boundary:
            return None
        if action.place:
            return self._resumption.opened(action.place)
        own = None
        if recovery.is_alone(self._node.job, action.ranks[0]):
            own = self._own_states.stored(self._node.slots[action.ranks[0]], action.boundary)
        if own is not None:
            return own
        newest = self._snapshots.newest
        if newest is None or newest.boundary != action.boundary:
            raise LookupError(f"there is no snapshot of step {action.boundary} any more")
        return newest.as_stored()

    def note_unusable(self, action: recovery.NoteUnusable) -> None:
        """Keep the next launch from the same failure."""
        self._node.log("checkpoint_unusable", place=action.place, reason=action.reason)
        if action.is_refused:  # why stands in the incident
            logger.warning("the same command and files do not resume from '%s' again", action.place)
        self._resumption.note_unusable(action.place, action.reason, action.is_refused)

    def _go_back(self, slot: RankSlot, stored: Stored | None) -> None:
        """Let a slot be as it was at the boundary of a snapshot or checkpoint; of another run's ranks, have no past."""
        board, row = self._node.board, slot.rank
        self._mirrors.forget(slot)
        if not slot.is_here or (stored is not None and stored.is_in_recorder):
            boundary = 0 if stored is None else stored.boundary
            slot.go_back_to(boundary)
            board.set(row, Field.RECORDED, boundary)
            board.set(row, Field.APPLIED, boundary)
            board.forget_process(row)
            return
        if stored is None:
            self._own_states.forget(slot)
        older = self._node.recorder_of(slot)
        recorder = self._node.new_recorder(slot)
        out, err = 0, 0
        boundary = 0 if stored is None else stored.boundary
        if stored is not None and stored.origin is None:
            part = stored.rank_part(slot.rank)
            recorder.restore(part)
            if self._is_trusted(slot):
                recorder.evidence.take_over(older.evidence, boundary)
            before = self._node.recorded(slot, stored.boundary)["lines"]
            out, err = (known + since for known, since in zip(before, part["lines"], strict=True))
        slot.go_back_to(boundary)
        board.set(row, Field.RECORDED, boundary)
        board.set(row, Field.APPLIED, boundary)
        board.set(row, Field.LINES_OUT, out)
        board.set(row, Field.LINES_ERR, err)
        board.forget_process(row)

    def _is_trusted(self, slot: RankSlot) -> bool:
        """Whether what a rank has done since is what it must do again: nothing says that its state was wrong."""
        incident = self._node.job.incident
        return not slot.divergence and (incident is None or incident.kind != recovery.MismatchFound.kind)

    def load_state(self, action: recovery.LoadState) -> None:
        """Have ranks load what replicas share."""
        slots = self._node.slots
        if len(action.ranks) == len(slots):
            self._comparisons.note_repair(action.ranks, action.boundary)
        for rank in action.ranks:
            stored = slots[rank].stored
            assert stored is not None
            owners = {key: list(ranks) for key, ranks in stored.replicas.parted.items()}
            order = to_rank.LoadState(action.generation, list(stored.files), owners, stored.header_of(rank))
            slots[rank].send(order)
