"""Who leads when agents end and the network falls apart, in any order: two never do. The network alone is simulated."""

from __future__ import annotations

import errno
import random
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.between.succession import Done, Succession
from ttprun.agent.lead.conduct import Leader
from ttprun.protocol import meeting

HISTORIES = 400


class Network:
    """Agents, of which node 0's leads, launchers that wait for slots, and what each of them has noticed.

    side      of each agent: only those on the same one can connect to each other
    cut       pairs whose connection broke as the network fell apart; it stays so when the network is whole again
    finished  the leader has gone on to the end of the job
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        nodes, waiting = draw.randint(2, 6), draw.randint(0, 2)
        self.agents = {number: Agent(self, number, nodes, waiting) for number in range(nodes)}
        self.side = dict.fromkeys(range(nodes + waiting), 0)
        self.waiting = range(nodes, nodes + waiting)
        self.ended: set[int] = set()
        peers = self.agents[0].peers
        peers.to_all = self.tell_followers  # type: ignore[method-assign]
        nothing: Any = None
        node: Any = SimpleNamespace(peers=peers, job=recovery.new_job(recovery.Settings(world_size=nodes)))
        reports: Any = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))
        self.leader = Leader(node, reports, nothing, nothing, nothing)
        self.cut: set[frozenset[int]] = set()
        self.finished: list[int] = []

    def hears(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.cut

    def fall_apart(self) -> None:
        """Some of one side cannot reach the others of it any more."""
        side = self.draw.choice(sorted(self.side.values()))
        new = max(self.side.values()) + 1
        self.side |= {number: new for number, at in self.side.items() if at == side and self.draw.random() < 0.5}
        pairs = combinations(self.side, 2)
        self.cut |= {frozenset(pair) for pair in pairs if self.side[pair[0]] != self.side[pair[1]]}

    def become_whole(self) -> None:
        self.side = dict.fromkeys(self.side, 0)

    def finish(self) -> None:
        """The leader does so without those that it has lost, if it may."""
        self.lose_followers()
        if 0 not in self.ended and recovery.may_lead(*self.agents[0].peers.reach, has_led=True):
            self.finished = [0]
            self.ended |= {number for number in self.side if self.hears(0, number)}  # it tells them

    def end(self) -> None:
        self.ended.add(self.draw.choice(sorted(self.side)))

    def notice(self) -> None:
        """The leader notices one that it has lost, or tells those who hear it who is left."""
        leader = self.agents[0].peers
        gone = [number for number in (*leader._links, *leader.pool._waiting) if not self.reaches(0, number)]
        if gone and self.draw.random() < 0.5:
            self.agents[0].lose_follower(self.draw.choice(gone))
        if 0 not in self.ended:
            self.leader.share()

    def tell_followers(self, message: object) -> None:
        for number, agent in self.agents.items():
            if number and isinstance(message, meeting.SparePools) and self.reaches(0, number):
                agent.peers.note_pools(message)

    def reaches(self, one: int, other: int) -> bool:
        return self.hears(one, other) and not self.ended & {one, other}

    def lose_followers(self) -> None:
        leader = self.agents[0]
        for number in (*leader.peers._links, *leader.peers.pool._waiting):
            if not self.reaches(0, number):
                leader.lose_follower(number)

    def leaders(self) -> list[int]:
        """Those that lead once all have noticed everything."""
        followers = [number for number in self.agents if number]
        self.lose_followers()
        is_deposed = 0 in self.ended or not recovery.may_lead(*self.agents[0].peers.reach, has_led=True)
        leads = self.finished if is_deposed else [0]
        self.ended |= {0} if is_deposed else set()
        self.draw.shuffle(followers)
        for number in followers:
            if not self.reaches(0, number) and number not in self.ended:
                self.agents[number].lose_leader(0)
        for number in self.waiting:
            heard = [other for other in sorted(followers) if self.reaches(number, other)]
            if heard and not self.reaches(0, number):
                self.agents[heard[0]].succession._early.append((FakeLink(), meeting.Hello("", -1, "", {})))
        for number in sorted(followers):
            self.agents[number].succession.look()
        return leads + [number for number in followers if self.agents[number].became == "leader"]


class FakeLink:
    def close(self) -> None:
        pass


class Agent:
    """A real `Peers` and a real `Succession`, whose dialling goes through the network."""

    def __init__(self, network: Network, number: int, nodes: int, waiting: int) -> None:
        self.network, self.number, self.became = network, number, ""
        pool: Any = SpareCount(waiting if number == 0 else 0, nodes)
        links: Any = {other: FakeLink() for other in range(1, nodes)} if number == 0 else {}
        self.peers = Peers(number, str(number), 1, {}, {}, nodes, pool, leader=0)
        self.peers._links = links
        self.peers.pools = {other: meeting.Where(str(other), other) for other in range(nodes)}
        self.peers.others = waiting
        node: Any = SimpleNamespace(verdict=None, peers=self.peers, selector=None, here=[], log=lambda *_, **__: None)
        follower: Any = SimpleNamespace(give_up=self.give_up)
        orders: Any = SimpleNamespace(catching_up=set(), parked={})
        nothing: Any = None
        self.succession = Succession(node, orders, follower, nothing, nothing, lambda: None)
        self.succession._dial = self.dial  # type: ignore[method-assign]
        self.succession._report_to = self.report_to  # type: ignore[method-assign]
        self.succession._lead = self.lead  # type: ignore[method-assign]

    def dial(self, listener: meeting.Where, limit_s: float, done: Done) -> None:
        if self.network.side[self.number] != self.network.side[listener.port]:
            done(None, errno.ETIMEDOUT)
        elif listener.port in self.network.ended:
            done(None, errno.ECONNREFUSED)
        else:
            sock: Any = FakeLink()
            done(sock, 0)

    def report_to(self, following: int, sock: Any, listener: meeting.Where) -> None:
        heir: Any = SimpleNamespace(link=FakeLink())
        self.network.agents[following].succession._heirs[self.number] = heir
        self.peers.leader = following

    def lose_follower(self, number: int) -> None:
        if number in self.peers._links:
            del self.peers._links[number]
            if not self.network.hears(self.number, number):
                self.peers.note_out_of_reach(number)
        else:
            self.peers.pool.lose(number, is_cut_off=not self.network.hears(self.number, number))  # type: ignore[union-attr]

    def lose_leader(self, number: int) -> None:
        if not self.network.hears(self.number, number):
            self.peers.note_out_of_reach(number)
        self.succession.begin(number, "it is lost")
        if self.succession._gathers is not None:
            self.succession._gathers = SimpleNamespace(look=lambda: True)  # type: ignore[assignment]

    def lead(self) -> None:
        self.became = "leader"

    def give_up(self, reason: str, kind: str = "fail") -> None:
        """The process ends: whoever had reported to it looks for another one."""
        self.became = reason
        self.network.ended.add(self.number)
        for number in list(self.succession._heirs):
            if number not in self.network.ended:
                self.network.agents[number].lose_leader(self.number)


class SpareCount:
    """A spare pool in which nobody speaks."""

    def __init__(self, waiting: int, nodes: int) -> None:
        self._waiting = list(range(nodes, nodes + waiting))
        self.out_of_reach_s: list[float] = []
        self.announce = lambda pools: None
        self.listener = SimpleNamespace(open=lambda *_: None)

    def __len__(self) -> int:
        return len(self._waiting)

    def lose(self, number: int, *, is_cut_off: bool) -> None:
        self._waiting.remove(number)
        if is_cut_off:
            self.out_of_reach_s.append(float("inf"))


def test_two_agents_never_lead_and_one_does_if_it_reaches_more_than_half() -> None:
    for seed in range(HISTORIES):
        network = Network(random.Random(seed))
        for _ in range(network.draw.randint(1, 6)):
            network.draw.choice([network.fall_apart, network.become_whole, network.end, network.finish, network.notice])()
        alive = {number for number in network.side if number not in network.ended}
        largest = max((sum(network.hears(one, other) for other in alive) for one in alive), default=0)

        leaders = network.leaders()

        assert len(leaders) <= 1, seed
        assert leaders or 2 * largest <= len(network.side), seed
