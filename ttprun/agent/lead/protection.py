"""What ranks report that keeps lost ranks from being repaired: noted, and said once. Begin with `note_unprotected`."""

from __future__ import annotations

import logging
import time

from ttprun import recovery
from ttprun.agent.lead.row import Row
from ttprun.agent.node.node import Node
from ttprun.agent.node.own_states import OwnStates
from ttprun.protocol import from_rank
from ttprun.protocol.reason import Reason

logger = logging.getLogger("ttprun")
_MOST_RETURNS = 3  # of protection: a script may lose it in each epoch


class Protection:
    """Whether the ranks can be repaired.

    announced   why they cannot, as far as the console was told in this run
    """

    def __init__(self, node: Node, own_states: OwnStates, announced: set[Reason]) -> None:
        self._node = node
        self._own_states = own_states
        self._announced = announced
        self._returns = 0

    def note_unprotected(self, slot: Row, reason: Reason) -> None:
        """No rank can be repaired any more."""
        node = self._node
        node.log("rank_unprotected", rank=slot.rank, reason=reason)
        is_first = not node.job.unprotected_reason
        node.advance(from_rank.RankUnprotected(at_s=time.monotonic(), rank=slot.rank, reason=reason))
        if is_first:
            self._pass_on(slot)
            self._announce(slot, reason)

    def note_membership(self, slot: Row, message: from_rank.RankTrainsAlone | from_rank.RankJoined) -> None:
        """A rank trains alone, or with others; one that cannot be repaired may be of a group from now on."""
        is_first = not self._node.job.unprotected_reason
        self._node.advance(message)
        if is_first:
            self._pass_on(slot)

    def _pass_on(self, slot: Row) -> None:
        """If no rank can be repaired any more because of this one, the others need not record anything for it."""
        reason = self._node.job.unprotected_reason
        for other in self._node.slots:
            if other is not slot and reason:
                other.send(from_rank.RankUnprotected(reason))

    def note_hindered(self, slot: Row, message: from_rank.RankHindered) -> None:
        """The place where a rank is now cannot be replayed, or can be again."""
        node, why, boundary = self._node, message.reason, message.boundary
        node.log("rank_hindered", rank=slot.rank, boundary=boundary, reason=why)
        was_hindered = bool(node.job.hindrance)
        node.advance(message)
        if why:
            self._announce(slot, why)
        elif was_hindered and not node.job.hindrance and self._returns < _MOST_RETURNS:
            self._returns += 1
            self._announced.clear()  # what comes back is said again
            more = "" if self._returns < _MOST_RETURNS else "; for further changes see 'ttprun status'"
            logger.warning("from step %d on a lost rank can be replaced%s", boundary, more)

    def _announce(self, slot: Row, why: Reason) -> None:
        """Say on the console why no rank can be replaced now, and what that means; once, not once a rank."""
        job = self._node.job
        if why in self._announced or job.settings.rungs.isdisjoint(("replace", "rerun", "rewind")):
            return
        self._announced.add(why)
        said = f"{why}{why.pointer}"
        if recovery.is_alone(job, slot.rank) and job.settings.world_size > 1:
            kept = self._own_states.newest(slot.rank)
            cost = recovery.cost_of_a_loss_alone(job, slot.rank, None, kept)
            logger.warning("rank %d is not protected: %s. If it is lost, %s", slot.rank, said, cost)
            return
        cost = recovery.cost_of_a_loss(job)
        logger.warning("not protected: rank %d reports: %s. If a rank is lost, %s", slot.rank, said, cost)
