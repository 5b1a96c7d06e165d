"""Which nodes the group has, and which it should have: the leader's side of `--elastic`.

What should be is decided by `recovery.membership_policy`; when it differs from what there is, all ranks save their
state at a boundary, and the group starts again on the other nodes. Begin with `NodeMembership.look`.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass

from ttprun import recovery
from ttprun.agent.checkpoints.quiesce_schedule import QuiesceSchedule
from ttprun.agent.cluster.discovery import Discovery
from ttprun.agent.core.node import Node
from ttprun.agent.core.outcomes import give_up
from ttprun.agent.launcher.resume import Resumption
from ttprun.agent.launcher.verdict import Verdict
from ttprun.errors import ConfigError
from ttprun.protocol import meeting
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.rank_events import StopAsked
from ttprun.recovery.membership_policy import Membership, MembershipPlan, NodesObserved
from ttprun.state.files import InvalidCheckpointError

logger = logging.getLogger("ttprun")

_TRY_AGAIN_S = 60.0  # after a resize that came to nothing


@dataclass(frozen=True)
class Elasticity:
    """Who may join.

    policy      None: the job is not elastic
    discovery   None: no command names the hosts
    """

    policy: Membership | None = None
    discovery: Discovery | None = None


class NodeMembership:
    """Has nodes join and leave.

    waits       why nodes do not join or leave though they should; "" if there is nothing to wait for
    """

    def __init__(
        self, node: Node, resumption: Resumption, quiesce_schedule: QuiesceSchedule, elasticity: Elasticity
    ) -> None:
        self._node = node
        self._resumption = resumption
        self._quiesce_schedule = quiesce_schedule
        self.policy = elasticity.policy
        self.discovery = elasticity.discovery
        self.waits = ""
        self._is_asked = False
        self._not_before_s = 0.0
        self._leaving: dict[int, str] = {}
        self._newcomers = range(0)  # nodes that came with the newest change
        self._attempt = 0

    def begin_group(self, attempt: int) -> None:
        """All nodes are there; `attempt` is the number of the group's, as torch counts restarts."""
        self._attempt = attempt
        self._is_asked, self.waits = False, ""
        self._newcomers = range(0)
        self._leaving.clear()

    def note_newcomers(self, order: meeting.Regroup) -> bool:
        """Note which nodes of the group that was started by this order have come; returns whether any has."""
        if self._node.peers.size == order.size:  # else they have other numbers than in the order
            self._newcomers = range(order.stayed, order.size)
        return bool(self._newcomers)

    def look(self) -> None:
        """Time has passed, or somebody has come: begin to resize if that is due."""
        node = self._node
        if self.policy is None or self._is_asked or node.verdict is not None:
            return
        if self.discovery is not None:
            self.discovery.start()
        plan = self.policy.planned(self._observation())
        if not plan.is_due or time.monotonic() < self._not_before_s:
            self._wait_for(plan.waits if not plan.is_due else self.waits)
            return
        why_not = plan.why_not or self._why_not_now()
        self._wait_for(f"{self._named(plan)}: {why_not}" if why_not else "")
        if why_not or node.job.phase is not recovery.JobPhase.RUNNING:
            return
        self._is_asked = True
        self._resumption.resize(plan.size * node.peers.ranks_per_node)
        reason = self._named(plan)
        node.log("resize_asked", reason=reason, nodes=plan.size)
        event = recovery.ResizeAsked(at_s=time.monotonic(), reason=reason)
        self._quiesce_schedule.ask(lambda: node.advance(event), is_end=False)

    def _why_not_now(self) -> str:
        if self._node.board.get(LEADER, Field.APPLIED) == 0:
            return "the ranks have not completed an optimizer step yet"
        return recovery.why_not_saved(self._node.job)

    def _wait_for(self, why: str) -> None:
        if why and why != self.waits:
            self._node.log("resize_waits", reason=why)
        self.waits = why

    def _observation(self) -> NodesObserved:
        peers = self._node.peers
        waiting = peers.pool.waiting if peers.pool is not None else ()
        return NodesObserved(
            at_s=time.monotonic(),
            members=tuple(peers.names[number] for number in range(peers.size)),
            lost=frozenset(number for number in range(peers.size) if not peers.is_connected(number)),
            leaving=frozenset(self._leaving),
            waiting=tuple((spare.address, spare.since_s) for spare in waiting),
            named=None if self.discovery is None else self.discovery.named,
        )

    def _named(self, plan: MembershipPlan) -> str:
        """What a plan changes, for people."""
        peers = self._node.peers
        waiting = peers.pool.waiting if peers.pool is not None else ()
        join = ", ".join(waiting[place].address for place in plan.join)
        leave = ", ".join(map(peers.name_of, plan.leave))
        parts = [
            f"{join} join{'s' * (len(plan.join) == 1)}" if join else "",
            f"{leave} leave{'s' * (len(plan.leave) == 1)}" if leave else "",
        ]
        return " and ".join(filter(None, parts)) or f"{len(plan.stay)} nodes are left"

    def leave(self, number: int, reason: str) -> None:
        """A node has announced that it leaves. If too few would be left, the job is saved and ends."""
        node = self._node
        self._leaving[number] = reason
        self._not_before_s = 0.0
        node.log("node_leaves", node=number, reason=reason)
        if self.policy is None or self.policy.planned(self._observation()).why_not:
            self._end(reason)
        else:
            self.look()

    def _end(self, reason: str) -> None:
        """A node leaves, and the others cannot train on without it."""
        node = self._node
        node.end_by(node.ended_by or signal.SIGUSR1)
        stop = StopAsked(at_s=time.monotonic(), reason=reason)
        self._quiesce_schedule.ask(lambda: node.advance(stop), is_end=True)

    def note_lost(self, number: int) -> None:
        """A node is lost: its host has to wait before it may train again."""
        if self.policy is not None:
            self._leaving.pop(number, None)
            self.policy = self.policy.with_lost([self._node.peers.names[number]], time.monotonic())

    def may_train(self, address: str) -> bool:
        """Whether a node may take slots now: not so soon after it was lost."""
        return self.policy is None or not self.policy.is_quarantined(address, time.monotonic())

    def quarantined(self) -> tuple[str, ...]:
        """Addresses that may not train yet."""
        return () if self.policy is None else self.policy.quarantined(time.monotonic())

    def may_shrink(self) -> bool:
        """Whether the nodes that are left are enough to train on; the checkpoint will then be resumed on those."""
        if self.policy is None:
            return False
        plan = self.policy.planned(self._observation())
        if not plan.why_not:
            self._resumption.resize(plan.size * self._node.peers.ranks_per_node)
        return not plan.why_not

    def give_up(self, order: recovery.GiveUpResize) -> None:
        """The group stays on its nodes for now."""
        node = self._node
        self._is_asked = False
        self._not_before_s = time.monotonic() + _TRY_AGAIN_S
        self.waits = f"{order.reason}; the next attempt is made in {_TRY_AGAIN_S:.0f} s"
        self._resumption.resize(len(node.slots))
        node.log("resize_given_up", reason=order.reason)
        logger.warning("the nodes stay as they are: %s", self.waits)
        if self._leaving:
            self._end("; ".join(self._leaving.values()))

    def regroup(self, order: recovery.Regroup) -> None:
        """Have the group start again on the nodes that are there now."""
        node, policy, peers = self._node, self.policy, self._node.peers
        assert policy is not None
        assert peers.pool is not None
        if order.is_back:
            policy = self.policy = policy.with_refused(peers.size, time.monotonic())
            self._leaving |= dict.fromkeys(self._newcomers, order.reason)
        plan = policy.planned(self._observation())
        why_not = plan.why_not or self._why_not_resumed(order, plan)
        if why_not:
            reason = f"{order.reason}; the group cannot start again: {why_not}"
            give_up(node, reason, is_new_incident=False)
            return
        waiting = [peers.pool.waiting[place] for place in plan.join]
        listeners = [*(peers.listeners[number] for number in plan.stay), *(spare.listener for spare in waiting)]
        node.log(
            "regroup", nodes=plan.size, stay=plan.stay, join=[spare.address for spare in waiting], reason=order.reason
        )
        logger.warning("all ranks start again on %d node%s: %s", plan.size, "s" * (plan.size > 1), order.reason)
        orders = [
            meeting.Regroup(
                node=number,
                size=plan.size,
                least=policy.min_nodes,
                stayed=len(plan.stay),
                where=listeners[0],
                attempt=self._attempt + 1,
                generation=node.job.generation,
                place=order.place,
                boundary=order.boundary,
                reason=order.reason,
            )
            for number in range(plan.size)
        ]
        own = None
        for number, theirs in zip(plan.stay, orders, strict=False):
            if number == peers.node:
                own = theirs
            else:
                peers.send(number, theirs)
        for spare, theirs in zip(waiting, orders[len(plan.stay) :], strict=True):
            peers.pool.dismiss(spare, theirs)
        for number in plan.leave:
            peers.send(number, meeting.Concluded("leave", order.reason, True, 0, signal.SIGUSR1))
        node.conclude(Verdict("resize" if peers.node in plan.stay else "leave", order.reason, regroup=own))

    def _why_not_resumed(self, order: recovery.Regroup, plan: MembershipPlan) -> str:
        """Why so many ranks cannot resume from the checkpoint, as far as that can be seen here; "" if they can."""
        self._resumption.resize(plan.size * self._node.peers.ranks_per_node)
        try:
            if order.place:
                self._resumption.open_new(order.place)
        except (ConfigError, InvalidCheckpointError) as error:
            return str(error)
        return ""
