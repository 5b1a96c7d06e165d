"""Do the ranks still hold the same weights? Their digests, compared boundary by boundary. Read `Replicas` first.

Ranks whose weights were never alike do not replicate each other: that is the script's business, and nothing is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

KEPT = 8  # boundaries that are not complete yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Ranks that held other weights than the rest.

    boundary   at which it was seen
    agreed_at  newest boundary before it at which all were alike
    ranks      that differ from the majority; empty if there is no majority
    digests    what each rank holds
    """

    boundary: int
    agreed_at: int
    ranks: tuple[int, ...]
    digests: tuple[str, ...] = ()

    @property
    def held(self) -> str:
        """Which ranks hold what, for an operator."""
        holders: dict[str, list[str]] = {}
        for rank, digest in enumerate(self.digests):
            holders.setdefault(digest, []).append(str(rank))
        return "; ".join(f"rank {', '.join(ranks)}: {digest[:8]}" for digest, ranks in holders.items())

    @property
    def sentence(self) -> str:
        """For an operator."""
        when = f"at boundary {self.boundary}; at boundary {self.agreed_at} they were alike"
        if not self.ranks:
            return f"the ranks hold different weights {when}, and no majority says which are right"
        return f"its weights differ from those of the other ranks {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """What ranks have said of their weights since the group was last whole.

    agreed_at   newest boundary at which all were alike; None before the first comparison
    are_alike   False once a first comparison has shown that the script's ranks do not replicate each other
    digests     boundary -> rank -> digest, while some rank is missing
    """

    world_size: int
    agreed_at: int | None = None
    are_alike: bool = True
    digests: Mapping[int, Mapping[int, str]] = field(default_factory=dict)

    def told(self, rank: int, boundary: int, digest: str) -> tuple[Replicas, Divergence | None]:
        """A rank says what it holds at a boundary; the answer comes with the last rank."""
        if not self.are_alike:
            return self, None
        of_boundary = {**self.digests.get(boundary, {}), rank: digest}
        if len(of_boundary) < self.world_size:
            newest = sorted({*self.digests, boundary})[-KEPT:]
            known = {**self.digests, boundary: of_boundary}
            return replace(self, digests={at: known[at] for at in newest}), None
        after = replace(self, digests={at: told for at, told in self.digests.items() if at > boundary})
        counts = Counter(of_boundary.values())
        if len(counts) == 1:
            return replace(after, agreed_at=boundary), None
        if self.agreed_at is None:
            return replace(after, are_alike=False), None
        common, times = counts.most_common(1)[0]
        has_majority = times * 2 > self.world_size
        odd = tuple(rank for rank, found in sorted(of_boundary.items()) if found != common) if has_majority else ()
        digests = tuple(of_boundary[rank] for rank in range(self.world_size))
        return after, Divergence(boundary=boundary, agreed_at=self.agreed_at, ranks=odd, digests=digests)
