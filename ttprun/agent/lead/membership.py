"""Which nodes the group has: who may join, who leaves, and who gets the slots of a lost one.

With `--elastic` a command of the user's may name the hosts (`Discovery`), and what should be is decided by
`recovery.elastic_policy`; when it differs from what there is, all ranks save their state at a boundary, and the
group starts again on the other nodes (`NodeMembership.look`). The slots of a lost node are given to a launcher that
waits (`spare_pool.py`): its ranks need what the lost ones have recorded, of which the node after the lost one has
copies (`Placement.start`).
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttprun import recovery
from ttprun.agent.base.ground import Verdict
from ttprun.agent.lead.resume import Resumption
from ttprun.agent.lead.rows import Lead, Wire
from ttprun.agent.lead.schedules import QuiesceSchedule
from ttprun.errors import ConfigError, one_line
from ttprun.protocol import meeting, node_messages, process_orders
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.rank_events import SpawnFailed, StopAsked
from ttprun.recovery.elastic_policy import Membership, MembershipPlan, NodesObserved, parse_hosts
from ttprun.state.files import InvalidCheckpointError

logger = logging.getLogger("ttprun")

EVERY_S = 5.0
LIMIT_S = 30.0  # for one run of the command


class Discovery:
    """Runs the command on a thread of its own.

    command          for the shell
    ranks_per_node   so many slots has a launcher
    named            address -> how many launchers it may have; None before the command has named any host
    """

    def __init__(self, command: str, ranks_per_node: int, every_s: float = EVERY_S) -> None:
        self._command = command
        self._ranks_per_node = ranks_per_node
        self._every_s = every_s
        self._is_failing = False
        self._thread: threading.Thread | None = None
        self.named: Mapping[str, int] | None = None

    def first(self) -> None:
        """Run the command until it names a host. Raises ConfigError if it fails at once."""
        is_said = False
        while True:
            try:
                hosts = self._run()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise ConfigError(
                    f"--discovery: '{self._command}' fails: {one_line(error)}", "it must print one host a line"
                ) from None
            if hosts:
                self.named = hosts
                return
            if not is_said:
                logger.warning("--discovery: '%s' names no host yet: waiting for one", self._command)
                is_said = True
            time.sleep(self._every_s)

    def start(self) -> None:
        """Run the command now and again from now on; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_running, name="ttprun-discovery", daemon=True)
            self._thread.start()

    def _keep_running(self) -> None:
        while True:
            self.poll()
            time.sleep(self._every_s)

    def poll(self) -> None:
        """Run the command once; what it cannot answer changes nothing."""
        why = "it names no host"
        try:
            hosts = self._run()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            hosts, why = {}, one_line(error)
        if hosts:
            self.named, self._is_failing = hosts, False
        elif not self._is_failing:
            logger.warning("--discovery: %s: the hosts that were named last stay, and it is run again", why)
            self._is_failing = True

    def _run(self) -> dict[str, int]:
        done = subprocess.run(self._command, shell=True, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            said = " ".join(done.stderr.split()) or "it says nothing on stderr"
            raise ValueError(f"exit code {done.returncode} ({said})")
        hosts: dict[str, int] = {}
        for host, launchers in parse_hosts(done.stdout, self._ranks_per_node).items():
            hosts.setdefault(_address_of(host), launchers)
        return hosts


def _address_of(host: str) -> str:
    """Its address, by which launchers name their nodes; the name itself if it is not known here."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


_TRY_AGAIN_S = 60.0  # after a resize that came to nothing


@dataclass
class Elasticity:
    """Who may join, in all groups of a launcher.

    policy         None: the job is not elastic
    discovery      None: no command names the hosts
    not_before_s   when the next resize may begin
    """

    policy: Membership | None = None
    discovery: Discovery | None = None
    not_before_s: float = 0.0


class NodeMembership:
    """Has nodes join and leave.

    attempt     number of the group, as torch counts restarts
    waits       why nodes do not join or leave though they should; "" if there is nothing to wait for
    """

    def __init__(
        self,
        node: Lead,
        resumption: Resumption,
        quiesce_schedule: QuiesceSchedule,
        elasticity: Elasticity,
        attempt: int = 0,
    ) -> None:
        self._node = node
        self._resumption = resumption
        self._quiesce_schedule = quiesce_schedule
        self._elasticity = elasticity
        self._attempt = attempt
        self.waits = ""
        self._is_asked = False
        self._leaving: dict[int, str] = {}
        self._newcomers = range(0)  # nodes that came with the newest change

    @property
    def policy(self) -> Membership | None:
        """None: the job is not elastic."""
        return self._elasticity.policy

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
        discovery = self._elasticity.discovery
        if discovery is not None:
            discovery.start()
        plan = self.policy.planned(self._observation())
        if not plan.is_due or time.monotonic() < self._elasticity.not_before_s:
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
        return str(recovery.why_not_saved(self._node.job))

    def _wait_for(self, why: str) -> None:
        if why and why != self.waits:
            self._node.log("resize_waits", reason=why)
        self.waits = why

    def _observation(self) -> NodesObserved:
        peers, discovery = self._node.peers, self._elasticity.discovery
        waiting = peers.pool.waiting if peers.pool is not None else ()
        return NodesObserved(
            at_s=time.monotonic(),
            members=tuple(peers.names[number] for number in range(peers.size)),
            lost=frozenset(number for number in range(peers.size) if not peers.is_connected(number)),
            leaving=frozenset(self._leaving),
            waiting=tuple((spare.address, spare.since_s) for spare in waiting),
            named=None if discovery is None else discovery.named,
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
        self._elasticity.not_before_s = 0.0
        node.log("node_leaves", node=number, reason=reason)
        if self.policy is None or self.policy.planned(self._observation()).why_not:
            self._end(reason)
        else:
            self.look()

    def _end(self, reason: str) -> None:
        """A node leaves, and the others cannot train on without it."""
        node = self._node
        node.ended_by = node.ended_by or signal.SIGUSR1
        stop = StopAsked(at_s=time.monotonic(), reason=reason)
        self._quiesce_schedule.ask(lambda: node.advance(stop), is_end=True)

    def note_lost(self, number: int) -> None:
        """A node is lost: its host has to wait before it may train again."""
        if self.policy is not None:
            self._leaving.pop(number, None)
            self._elasticity.policy = self.policy.with_lost([self._node.peers.names[number]], time.monotonic())

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
        self._elasticity.not_before_s = time.monotonic() + _TRY_AGAIN_S
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
            policy = self._elasticity.policy = policy.with_refused(peers.size, time.monotonic())
            self._leaving |= dict.fromkeys(self._newcomers, str(order.reason))
        plan = policy.planned(self._observation())
        why_not = plan.why_not or self._why_not_resumed(order, plan)
        if why_not:
            reason = f"{order.reason}; the group cannot start again: {why_not}"
            node.give_up(reason, is_new_incident=False)
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
                reason=str(order.reason),
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
            peers.send(number, meeting.Concluded("leave", str(order.reason), True, 0, signal.SIGUSR1))
        node.conclude(Verdict("resize" if peers.node in plan.stay else "leave", str(order.reason), regroup=own))

    def _why_not_resumed(self, order: recovery.Regroup, plan: MembershipPlan) -> str:
        """Why so many ranks cannot resume from the checkpoint, as far as that can be seen here; "" if they can."""
        self._resumption.resize(plan.size * self._node.peers.ranks_per_node)
        try:
            if order.place:
                self._resumption.opened(order.place, is_new=True)
        except (ConfigError, InvalidCheckpointError) as error:
            return str(error)
        return ""


@dataclass
class Vacancy:
    """The slots of one lost node.

    spawns   orders that wait for a node, or for its records, by rank
    due      ranks whose records have not come; None: no launcher has taken the slots
    """

    since_s: float
    spawns: dict[int, process_orders.SpawnRank] = field(default_factory=dict)
    due: set[int] | None = None


class Placement:
    """Gives the slots of lost nodes away.

    membership   knows which nodes may train
    """

    def __init__(self, node: Lead, wire: Wire, membership: NodeMembership) -> None:
        self._node = node
        self._wire = wire
        self._vacant: dict[int, Vacancy] = {}
        self._membership = membership

    @property
    def waited_for(self) -> str:
        """What the ranks that are left wait for; "" if they do not."""
        lost = [number for number, vacancy in self._vacant.items() if vacancy.due is None]
        if not lost:
            return ""
        since_s = min(self._vacant[number].since_s for number in lost)
        left_s = max(0.0, self._node.config.node_wait_s - (time.monotonic() - since_s))
        names = ", ".join(map(self._node.peers.name_of, lost))
        return f"{names} is lost: waiting {left_s:.0f} s more for a launcher to take its place (--node-wait-s)"

    def start(self, action: process_orders.SpawnRank) -> None:
        """Give a rank a process; if its node is lost, another one is waited for."""
        peers = self._node.peers
        number = peers.node_of(action.rank)
        vacancy = self._vacant.get(number)
        if vacancy is None and peers.is_connected(number):
            self._wire.order_on(number, action)
            return
        if vacancy is None:
            vacancy = self._vacant[number] = Vacancy(time.monotonic())
        vacancy.spawns[action.rank] = action
        self.fill()

    def has_waiting(self) -> bool:
        """A launcher waits for slots, and its node may train."""
        pool = self._node.peers.pool
        return pool is not None and any(self._membership.may_train(one.address) for one in pool.waiting)

    def drain(self, number: int, reason: str) -> str:
        """Have a node that waits take the place of one that trains, once all ranks stand still.

        reason    who asks, and why
        returns   why that cannot be; "" if it is begun
        """
        node, peers = self._node, self._node.peers
        if number == peers.node:
            return f"{peers.name_of(number)} leads the job, and cannot be drained"
        ranks = tuple(slot.rank for slot in node.slots if peers.node_of(slot.rank) == number and not slot.is_finished)
        why_not = str(recovery.why_not_replaceable(node.job, ranks, node.keeps_mirrors_twice))
        if not why_not and not self.has_waiting():
            why_not = "no other node waits (start a launcher more than --nnodes)"
        if not why_not:
            node.advance(
                recovery.ReplacementAsked(at_s=time.monotonic(), ranks=ranks, reason=reason, node=peers.name_of(number))
            )
        return why_not

    def forget(self, number: int) -> None:
        """A node is lost, perhaps the one that has just taken these slots."""
        self._vacant.pop(number, None)

    def lose_copies(self, keeper: int) -> None:
        """A node is lost: what it kept of the node before it, and has not sent, will not come."""
        vacancy = self._vacant.get((keeper - 1) % self._node.peers.size)
        for rank in sorted(vacancy.due or ()) if vacancy is not None else ():
            self.take_records(node_messages.Records(rank, ""))

    def fill(self) -> None:
        """Give the slots of lost nodes to launchers that wait, as far as there are any."""
        peers = self._node.peers
        for number, vacancy in list(self._vacant.items()):
            if vacancy.due is not None or not vacancy.spawns:
                continue
            address = peers.slot(number, self._membership.may_train)
            if address is None:
                return
            self._node.log("node_replaced", node=number, address=address, waited_s=time.monotonic() - vacancy.since_s)
            logger.warning("%s takes the place of the lost node %d", peers.shown(number), number)
            ranks = range(number * peers.ranks_per_node, (number + 1) * peers.ranks_per_node)
            vacancy.due = set(ranks)
            self._ask_for_records(number, list(ranks))

    def _ask_for_records(self, number: int, ranks: list[int]) -> None:
        """They are on the next node."""
        peers = self._node.peers
        keeper = (number + 1) % peers.size
        if peers.is_connected(keeper):
            self._wire.order_on(keeper, node_messages.GiveRecords(ranks))
        else:
            for rank in ranks:
                self.take_records(node_messages.Records(rank, ""))

    def take_records(self, records: node_messages.Records) -> None:
        """The records of a lost rank have come, or word that there are none."""
        peers, rank = self._node.peers, records.rank
        number = peers.node_of(rank)
        vacancy = self._vacant.get(number)
        if vacancy is None or vacancy.due is None:
            return  # another node has been lost meanwhile
        peers.send(number, records)
        vacancy.due.discard(rank)
        if not records.part:
            self._fail(vacancy, rank, "no copy of its records has reached another node")
        if vacancy.due or number not in self._vacant:
            return
        del self._vacant[number]
        source = self._node.job.source
        if source is not None:
            self._wire.order_on(number, node_messages.VoidBeyond(source.boundary))
        for action in vacancy.spawns.values():
            self._wire.order_on(number, action)

    def look(self) -> None:
        """Time has passed: who waits may train by now, and nobody waits for ever."""
        self.fill()
        limit_s = self._node.config.node_wait_s
        for number, vacancy in list(self._vacant.items()):
            if vacancy.due is not None or not vacancy.spawns:
                continue
            name = self._node.peers.name_of(number)
            why = f"{name} is lost, and no other took its place within {limit_s:g} s (--node-wait-s)"
            if self._membership.may_shrink():
                why = f"{name} is lost, and the nodes that are left are enough (--elastic)"
            elif time.monotonic() - vacancy.since_s < limit_s:
                continue
            for rank in list(vacancy.spawns):
                self._fail(vacancy, rank, why)

    def _fail(self, vacancy: Vacancy, rank: int, reason: str) -> None:
        if vacancy.spawns.pop(rank, None) is not None:
            self._node.log("spawn_failed", rank=rank, reason=reason)
            self._node.advance(SpawnFailed(at_s=time.monotonic(), rank=rank, reason=reason))
