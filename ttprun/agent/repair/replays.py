"""The agent's side of replays: the state machine's orders to ranks whose script knows nothing of recovery.

A replacement runs the script up to the boundary that the survivors hold, and gets their weights there. Begin with
`Replays.replay`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.checkpoints.checkpoints import Checkpoints
from ttprun.agent.cluster.actuators import Actuators
from ttprun.agent.core.node import Node
from ttprun.agent.core.outcomes import report_mismatch
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.repair import alignments
from ttprun.agent.repair.alignments import Alignments
from ttprun.agent.repair.comparisons import Comparisons
from ttprun.agent.repair.repairs import Repairs
from ttprun.groups.agreement import Agreed, Operation, expected_of
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.from_rank import GroupJournal


@dataclass
class Replays(Repairs):
    """Repairs the ranks of a node by replay."""

    _node: Node
    _actuators: Actuators
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
        if action.source is None and stored is not None and stored.origin is not None:
            slot.send(replace(action, adapt=to_rank.Adapt(stored.origin.paths, node.config.resume_hyperparameters)))
            return
        if action.source == action.rank and slot.divergence:
            reason = f"rank {action.rank} has diverged, and its mirror holds the same"
            report_mismatch(node, action.rank, action.generation, reason)
            return
        source, peers = action.source, None
        if source is not None and source != action.rank and not slot.divergence:
            peers = self._actuators.of(source).fingerprint(source, action.boundary)
        is_before_step = node.job.replicas.has_collective_steps
        filled = {"is_contradicted": node.job.is_contradicted, "is_before_step": is_before_step}
        self._actuators.order(action.rank, replace(action, fingerprint=peers, **filled))

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
        self._actuators.order(action.rank, replace(action, is_before_step=is_before_step))

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
            self._actuators.of(rank).forward(rank, resume)

    def _whose_gradients(
        self, action: to_rank.Resume, journals: Mapping[int, dict[str, GroupJournal]], given: Collection[Operation]
    ) -> dict[int, int]:
        """See `alignments.plan`. A collective step is taken with the other ranks, after the boundary."""
        job = self._node.job
        if job.replicas.has_collective_steps or job.settings.are_replicas_declared:
            return {}
        return alignments.plan(journals, given, job.alike(action.ranks), job.lost)

    def take(self, slot: RankSlot, message: mindio.Report | from_rank.OfAlignment) -> None:
        """A replacement asks for gradients, or a rank has taken them."""
        match message:
            case from_rank.Unaligned():
                self._alignments.ask(slot.rank, message)
            case from_rank.Aligned():
                self._alignments.note(slot.rank, message)

    def persist(self, action: recovery.Persist) -> None:
        """Write a checkpoint of what the survivors hold."""
        self._checkpoints.persist(action)
