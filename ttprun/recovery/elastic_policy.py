"""Which nodes train, which wait, and when the group starts again on others: the policy of `--elastic`, without a clock.

A node is a host with one launcher. Those that train stay, in their order, so the first of them has rank 0 afterwards
too; those that wait join behind them in the order in which they have come. A host whose node was lost is kept waiting,
each time twice as long; so are all that would make a number of nodes with which the ranks could not go on. Begin with
`Membership.planned`. Also here: which agent may lead (`may_lead`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

SETTLE_S = 3.0  # newcomers are waited for, so that several that come together cost one pause
COOLDOWN_S = 10.0  # of a host whose node was lost for the first time
REFUSED_S = 60.0  # before the same number of nodes is tried again, for the first time
MOST_COOLDOWN_S = 3600.0
_SHOWN = 80  # characters of what is refused


@dataclass(frozen=True, kw_only=True)
class NodesObserved:
    """What is known at one moment.

    members   hosts of the group's nodes, by number
    lost      numbers of nodes that are gone
    leaving   numbers of nodes that have announced that they leave
    waiting   (host, since when) of the launchers that wait, the first to come first
    named     host -> how many launchers it may have, by the discovery command; None: there is no such command
    """

    at_s: float
    members: tuple[str, ...]
    lost: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    waiting: tuple[tuple[str, float], ...] = ()
    named: Mapping[str, int] | None = None


@dataclass(frozen=True)
class MembershipPlan:
    """The group as it should be.

    stay      numbers of nodes that stay, in order
    join      which of those that wait join, in order
    leave     numbers of nodes that leave though they are there
    is_due    it differs from what there is, and need not wait
    why_not   why such a group cannot train; "" if it can
    waits     why those that could join do not; "" if they do
    """

    stay: tuple[int, ...]
    join: tuple[int, ...]
    leave: tuple[int, ...]
    is_due: bool
    why_not: str = ""
    waits: str = ""

    @property
    def size(self) -> int:
        """Nodes of the group."""
        return len(self.stay) + len(self.join)


@dataclass(frozen=True)
class Quarantine:
    """A host whose node was lost, or a number of nodes with which the ranks could not go on.

    times     how often
    until_s   when it may be tried again
    """

    times: int
    until_s: float


@dataclass(frozen=True)
class Membership:
    """The policy of one job, with what it remembers of hosts."""

    min_nodes: int
    max_nodes: int
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    refused: Mapping[int, Quarantine] = field(default_factory=dict)

    def planned(self, observation: NodesObserved) -> MembershipPlan:
        """The group as it should be now."""
        room = dict(observation.named) if observation.named is not None else None
        stay: list[int] = []
        leave: list[int] = []
        for number, host in enumerate(observation.members):
            if number in observation.lost:
                continue
            is_kept = number not in observation.leaving and _has_room(room, host)
            (stay if is_kept else leave).append(number)
        able = [
            place
            for place, (host, _) in enumerate(observation.waiting)
            if not self.is_quarantined(host, observation.at_s) and _has_room(room, host)
        ]
        most = min(len(able), max(0, self.max_nodes - len(stay)))
        sizes = range(len(stay) + most, len(stay), -1)
        size = next((size for size in sizes if not self._is_refused(size, observation.at_s)), len(stay))
        join = able[: size - len(stay)]
        waits = ""
        if size < len(stay) + most:
            waits = f"with {len(stay) + most} nodes the ranks could not go on; that is tried again later"
        has_settled = all(observation.at_s - observation.waiting[place][1] >= SETTLE_S for place in join)
        is_smaller = len(stay) < len(observation.members)
        why_not = ""
        if len(stay) + len(join) < self.min_nodes:
            why_not = f"{len(stay) + len(join)} of at least {self.min_nodes} nodes are there"
        is_due = is_smaller or (bool(join) and has_settled)
        return MembershipPlan(tuple(stay), tuple(join), tuple(leave), is_due, why_not, waits)

    def _is_refused(self, size: int, at_s: float) -> bool:
        refusal = self.refused.get(size)
        return refusal is not None and at_s < refusal.until_s

    def is_quarantined(self, host: str, at_s: float) -> bool:
        """A host must wait since its node was lost."""
        quarantine = self.quarantines.get(host)
        return quarantine is not None and at_s < quarantine.until_s

    def quarantined(self, at_s: float) -> tuple[str, ...]:
        """All hosts that must wait."""
        return tuple(host for host in self.quarantines if self.is_quarantined(host, at_s))

    def with_lost(self, hosts: Collection[str], at_s: float) -> Membership:
        """The nodes of these hosts were lost."""
        quarantines = dict(self.quarantines)
        for host in hosts:
            quarantines[host] = _once_more(quarantines.get(host), at_s, COOLDOWN_S)
        return replace(self, quarantines=quarantines)

    def with_refused(self, size: int, at_s: float) -> Membership:
        """The ranks of so many nodes could not go on."""
        return replace(self, refused={**self.refused, size: _once_more(self.refused.get(size), at_s, REFUSED_S)})


def _once_more(before: Quarantine | None, at_s: float, first_s: float) -> Quarantine:
    times = before.times + 1 if before is not None else 1
    return Quarantine(times, at_s + min(MOST_COOLDOWN_S, first_s * 2.0 ** (times - 1)))


def _has_room(room: dict[str, int] | None, host: str) -> bool:
    """Whether a host may have one more launcher, which is then counted."""
    if room is None:
        return True
    free = room.get(host, 0)
    room[host] = free - 1
    return free > 0


def parse_hosts(text: str, ranks_per_node: int) -> dict[str, int]:
    """Host -> how many launchers it may have, of what a discovery command has printed, in its order.

    Lines are `host`, for one launcher, or `host:slots`, for as many as have ranks in so many slots. Blank lines and
    comments (#) are skipped; of a host that is named several times the first line counts. Raises ValueError.
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host, colon, slots = words.partition(":")
        if colon and not slots.strip().isdecimal():
            raise ValueError(f"'{words[:_SHOWN]}' is not 'host' or 'host:slots'")
        hosts.setdefault(host.strip(), int(slots) // ranks_per_node if colon else 1)
    return hosts


def may_lead(reached: int, agents: int, *, has_led: bool) -> bool:
    """Whether an agent leads on, or leads next: two never do, since of two halves the one with the old leader does.

    reached   agents that it reaches, itself among them
    agents    all that may still live, as far as it knows
    has_led   it leads, and has lost some of them; else it would be the next one
    """
    return 2 * reached >= agents if has_led else 2 * reached > agents
