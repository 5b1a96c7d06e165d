"""Who leads when agents end and the network falls apart, in any order: two never do. The network alone is simulated."""

from __future__ import annotations

import errno
import random
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.spare_pool import SparePool
from ttprun.agent.between.succession import Done, Succession
from ttprun.agent.lead.coordinator import Leader
from ttprun.protocol import meeting

LINK: Any = SimpleNamespace(close=lambda: None)
NOTHING: Any = None


class Network:
    """Agents, of which node 0's leads, and launchers that wait for slots.

    side      of each: only those on the same one can connect to each other
    cut       pairs whose connection broke as the network fell apart; it stays so when the network is whole again
    finished  the leader has gone on to the end of the job
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        nodes, waiting = draw.randint(2, 6), draw.randint(0, 2)
        self.agents = {number: Agent(self, number, nodes, waiting) for number in range(nodes)}
        self.side = dict.fromkeys(range(nodes + waiting), 0)
        self.ended: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.finished: list[int] = []
        peers = self.agents[0].peers
        peers._links = dict.fromkeys(range(1, nodes), LINK)
        peers.to_all = self.tell_followers  # type: ignore[method-assign]
        node: Any = SimpleNamespace(peers=peers, job=recovery.new_job(recovery.Settings(world_size=nodes)))
        reports: Any = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))
        self.leader = Leader(node, reports, NOTHING, NOTHING, NOTHING)

    def hears(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.cut

    def reaches(self, one: int, other: int) -> bool:
        return self.hears(one, other) and not self.ended & {one, other}

    def tell_followers(self, message: object) -> None:
        for number in range(1, len(self.agents)):
            if isinstance(message, meeting.SparePools) and self.reaches(0, number):
                self.agents[number].peers.note_pools(message)

    def fall_apart(self) -> None:
        new = len(self.cut) + 1
        self.side |= {number: new for number in self.side if self.draw.random() < 0.4}
        pairs = combinations(self.side, 2)
        self.cut |= {frozenset((one, other)) for one, other in pairs if self.side[one] != self.side[other]}

    def end(self) -> None:
        self.ended.add(self.draw.choice(sorted(self.side)))

    def notice(self) -> None:
        """The leader may notice one that it has lost, and tells those who hear it who is left."""
        if 0 not in self.ended:
            self.agents[0].lose_followers(self.draw.randint(0, 1))
            self.leader.share()

    def finish(self) -> None:
        """The leader does so without those that it has lost, if it may, and tells those who hear it."""
        self.agents[0].lose_followers()
        if 0 not in self.ended and recovery.may_lead(*self.agents[0].peers.reach, has_led=True):
            self.finished = [0]
            self.ended |= {number for number in self.side if self.hears(0, number)}

    def leaders(self) -> list[int]:
        """Those that lead once all have noticed everything."""
        self.agents[0].lose_followers()
        is_deposed = 0 in self.ended or not recovery.may_lead(*self.agents[0].peers.reach, has_led=True)
        self.ended |= {0} if is_deposed else set()
        followers = list(range(1, len(self.agents)))
        for number in self.draw.sample(followers, len(followers)):
            if not self.reaches(0, number) and number not in self.ended:
                self.agents[number].lose_leader(0)
        for number in range(len(self.agents), len(self.side)):
            heard = [other for other in followers if self.reaches(number, other) and not self.reaches(0, number)]
            for other in heard[:1]:
                self.agents[other].succession._early.append((LINK, meeting.Hello("", -1, "", {})))
        for number in followers:
            self.agents[number].succession.look()
        return (self.finished if is_deposed else [0]) + [number for number in followers if self.agents[number].leads]


class Agent:
    """A real `Peers` and a real `Succession`, whose dialling goes through the network."""

    def __init__(self, network: Network, number: int, nodes: int, waiting: int) -> None:
        self.network, self.number = network, number
        self.leads: list[bool] = []
        self.waiting = list(range(nodes, nodes + waiting)) if number == 0 else []
        listener: Any = SimpleNamespace(open=lambda *_: None)
        pool: Any = SparePool(listener, {})
        vars(pool).update(_waiting=self.waiting, announce=lambda pools: None)
        self.peers = Peers(number, str(number), 1, {}, {}, nodes, pool)
        self.peers.pools = {other: meeting.Where(str(other), other) for other in range(nodes)}
        self.peers.others = waiting
        node: Any = SimpleNamespace(verdict=None, peers=self.peers, selector=None, here=[], log=lambda *_, **__: None)
        follower: Any = SimpleNamespace(give_up=self.give_up)
        orders: Any = SimpleNamespace(catching_up=set(), parked={})
        self.succession = Succession(node, orders, follower, NOTHING, NOTHING, lambda: None)
        lead = partial(self.leads.append, True)
        vars(self.succession).update(_dial=self.dial, _report_to=self.report_to, _lead=lead)

    def dial(self, listener: meeting.Where, limit_s: float, done: Done) -> None:
        is_there = self.network.side[self.number] == self.network.side[listener.port]
        has_ended = listener.port in self.network.ended
        code = (errno.ECONNREFUSED if has_ended else 0) if is_there else errno.ETIMEDOUT
        done(None if code else LINK, code)

    def report_to(self, following: int, sock: object, token: str) -> None:
        heir: Any = SimpleNamespace(link=LINK)
        self.network.agents[following].succession._heirs[self.number] = heir
        self.peers.leader = following

    def lose_followers(self, most: int = 9) -> None:
        known = (*self.peers._links, *self.waiting)
        gone = [number for number in known if not self.network.reaches(self.number, number)]
        for number in self.network.draw.sample(gone, min(most, len(gone))):
            is_cut_off = not self.network.hears(self.number, number)
            if self.peers._links.pop(number, None) is None:
                self.waiting.remove(number)
                self.peers.pool.out_of_reach_s += [float("inf")] * is_cut_off  # type: ignore[union-attr]
            elif is_cut_off:
                self.peers.note_out_of_reach(number)

    def lose_leader(self, number: int) -> None:
        if not self.network.hears(self.number, number):
            self.peers.note_out_of_reach(number)
        self.succession.begin(number, "it is lost")
        if self.succession._gathers is not None:
            vars(self.succession).update(_gathers=SimpleNamespace(look=lambda: True))

    def give_up(self, reason: str, kind: str = "fail") -> None:
        """The process ends: whoever had reported to it looks for another one."""
        self.network.ended.add(self.number)
        for number in self.succession._heirs.keys() - self.network.ended:
            self.network.agents[number].lose_leader(self.number)


def test_two_agents_never_lead_and_one_does_if_it_reaches_more_than_half() -> None:
    for seed in range(1000):
        network = Network(random.Random(seed))
        become_whole = partial(network.side.update, dict.fromkeys(network.side, 0))
        kinds = [network.fall_apart, become_whole, network.end, network.finish, network.notice]
        for happens in network.draw.choices(kinds, k=network.draw.randint(1, 6)):
            happens()
        alive = network.side.keys() - network.ended
        largest = max((sum(network.hears(one, other) for other in alive) for one in alive), default=0)
        leaders = network.leaders()
        assert len(leaders) <= 1, seed
        assert leaders or 2 * largest <= len(network.side), seed
