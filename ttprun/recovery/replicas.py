"""Which ranks hold the same state? A fact, from digests of all that each rank trains. Read `Replicas`, then `Looks`.

At a *look* each rank reports a digest of every parameter of its optimizers, with the parameter's gradient and optimizer
state. Ranks that differ in one of them are no replicas of each other from then on, for good: shards of a layer may
start with equal values, and their gradients or moments differ all the same. Only a rank that has always agreed with
another one may be its source, be saved for it, or be compared with it.

Survivors must also have issued the same collectives (`find_difference`), or they would wait for each other for ever on
resume: a rank that leaves one out, or issues another, may be seen only as a connection on which nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from math import isclose
from typing import NamedTuple

from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import PART_DIGITS, PARTS

KEPT = 8  # boundaries that are not complete yet
PART = 128  # ranks whose reports are kept together: a report copies those of its part only
_MOST_NAMED = 3

Reported = tuple[int, bool]
Held = tuple[str, str]  # of one parameter: digest of the weights, digest of gradient and optimizer state


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Which ranks have always held the same.

    compared_at  newest boundary of a full comparison; None: there was none, so no replica is known
    differing    key of each parameter that differs somewhere -> by rank, the lowest rank that has always held the same
    shards       the same of each parameter whose mesh declares that a rank holds a part of it
    names        key -> name for people, of those
    mirrored     ranks whose own state is kept in memory that outlives their processes
    has_collective_steps  an optimizer communicates inside step(): in its middle no survivor has a boundary's state
    """

    compared_at: int | None = None
    differing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    mirrored: frozenset[int] = frozenset()
    has_collective_steps: bool = False

    @property
    def unequal(self) -> Mapping[str, tuple[int, ...]]:
        """Of all parameters that not all ranks hold alike, the owners by rank."""
        return {**self.differing, **self.shards}

    def of(self, rank: int) -> tuple[int, ...]:
        """A key that is equal for ranks that have always held what this one held, and for no other rank."""
        return tuple(owners[rank] for owners in (*self.differing.values(), *self.shards.values()))

    def peers(self, rank: int, among: Iterable[int]) -> tuple[int, ...]:
        """Those among these ranks that hold all that this one holds, itself not among them."""
        own = self.of(rank)
        return tuple(other for other in among if other != rank and self.of(other) == own)

    def missing(self, rank: int, among: Collection[int]) -> list[str]:
        """Names of the parameters of a rank that none of these ranks holds."""
        return [
            self.names.get(key, key)
            for key, owners in self.unequal.items()
            if not any(owners[other] == owners[rank] for other in among)
        ]

    def why_no_source(self, rank: int, among: Collection[int]) -> Reason:
        """Why none of these ranks can give another one its state; "" if one can."""
        if self.compared_at is None:
            return Reason(
                "not-compared-yet", f"whether another rank holds the same as rank {rank} has not been compared yet"
            )
        if self.peers(rank, among):
            return Reason()
        missing = self.missing(rank, among)
        if missing:
            return Reason("state-of-one-rank", f"no other rank holds what rank {rank} held: {in_short(missing)}")
        return Reason(
            "state-of-one-rank", f"no single rank holds all that rank {rank} held ({in_short(self.all_names)})"
        )

    def sources(self, ranks: Collection[int], among: Iterable[int]) -> dict[int, int]:
        """Rank -> the first of the others that holds all that it holds; without those of which none does."""
        if self.compared_at is None:
            return {}
        holdings = {rank: self.of(rank) for rank in ranks}
        first: dict[tuple[int, ...], int] = {}
        missing = set(holdings.values())
        for other in among if missing else ():
            own = self.of(other)
            if own in missing:
                first[own] = other
                missing.discard(own)
                if not missing:
                    break
        return {rank: first[own] for rank, own in holdings.items() if own in first}

    def contradicted_by(self, digests: Mapping[int, Mapping[str, str]]) -> list[str]:
        """Keys of the parameters in which ranks differ that are taken for replicas.

        digests   rank -> key of each parameter -> digest
        """
        contradicted = []
        for key in dict.fromkeys(key for of_rank in digests.values() for key in of_rank):
            digest_of: dict[int, str | None] = {}
            for rank, of_rank in digests.items():
                owner = self.differing[key][rank] if key in self.differing else 0
                if digest_of.setdefault(owner, of_rank.get(key)) != of_rank.get(key):
                    contradicted.append(key)
                    break
        return contradicted

    @property
    def all_names(self) -> list[str]:
        """Of the parameters that differ somewhere."""
        return [self.names.get(key, key) for key in self.unequal]

    @property
    def single_holders(self) -> frozenset[int]:
        """Ranks that hold what no other one does: in the middle of a collective step, each of them."""
        if self.has_collective_steps:
            return frozenset(rank for ranks in self.groups for rank in ranks)
        return frozenset(ranks[0] for ranks in self.groups if len(ranks) == 1)

    @property
    def needs_snapshots(self) -> bool:
        """Some rank holds what no other one does, and does not mirror it."""
        return not self.single_holders <= self.mirrored

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks, those that hold the same together."""
        return self.alike(range(len(next(iter(self.unequal.values()), ()))))

    def alike(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """These ranks, those that hold the same together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.of(rank), []).append(rank)
        return [tuple(members) for members in groups.values()]


UNKNOWN = Replicas()

Cut = Mapping[str, tuple[str, str]]  # key of a parameter -> how it is cut, and which part


def why_not_one_whole(shards: Mapping[str, tuple[int, ...]], cuts: Sequence[Cut], names: Mapping[str, str]) -> Reason:
    """Why the ranks' parts of a parameter do not make one whole; "" if they do.

    A mesh of some ranks only says nothing of the others: they must cut alike, and hold the same in the same place.

    shards   of `Replicas`
    cuts     by rank
    names    key -> name for people
    """
    for key, owners in shards.items():
        name = names.get(key, key)
        parts = [of_rank.get(key) for of_rank in cuts]
        places: dict[str, int] = {}
        if len({cut and cut[0] for cut in parts}) > 1:
            return Reason("sharding-unknown", f"not all ranks shard {name} in the same way")
        for rank, cut in enumerate(parts):
            if cut is not None and places.setdefault(cut[1], owners[rank]) != owners[rank]:
                return Reason(
                    "sharding-unknown",
                    f"rank {places[cut[1]]} and rank {owners[rank]} hold different parameters {name} in the same place",
                )
    return Reason()


def in_short(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Ranks whose weights differ from those of their replica peers, though their gradients do not.

    boundary   at which it was seen
    agreed_at  newest boundary before it at which all replica peers were alike
    ranks      that differ from the majority of their peers; empty if there is no majority
    digests    what each rank holds of the first parameter that differs
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
        when = f"at boundary {self.boundary}; at boundary {self.agreed_at} they were equal"
        if not self.ranks:
            return f"the ranks hold different weights {when}, and no majority says which are right"
        return f"its weights differ from those of the other ranks {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What came out of one boundary at which all ranks have reported.

    differing   keys of the parameters in which replicas have turned out to be none, mapped to the ranks now unlike
    divergence  None if all replica peers hold the same weights
    """

    boundary: int
    is_full: bool
    differing: Mapping[str, tuple[int, ...]]
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What ranks have reported of their state since the group was last whole.

    replicas    what is known by now
    agreed_at   newest boundary at which all replica peers were alike; None before the first look
    reported    (boundary, whether in full) -> part of the ranks -> rank -> key -> digests, while some rank is missing
    """

    world_size: int
    replicas: Replicas = UNKNOWN
    agreed_at: int | None = None
    reported: Mapping[Reported, Mapping[int, Mapping[int, Mapping[str, Held]]]] = field(default_factory=dict)

    def why_not_one_whole(self, cuts: Sequence[Cut], names: Mapping[str, str]) -> Reason:
        """As the function of this name, of what is known by now."""
        return why_not_one_whole(self.replicas.shards, cuts, names)

    def note(
        self,
        rank: int,
        boundary: int,
        digests: Mapping[str, Held],
        is_full: bool,
        shards: Collection[str] = (),
    ) -> tuple[Looks, Look | None]:
        """A rank reports what it holds at a boundary; the answer comes with the last rank's report.

        digests  key of each parameter -> digests; the second one "" where it was not asked for
        is_full  gradients and optimizer state were looked at, too
        shards   keys of the parameters of which a mesh declares that this rank holds a part
        """
        this = (boundary, is_full)
        before = self.reported.get(this, {})
        of_boundary = {**before, rank // PART: {**before.get(rank // PART, {}), rank: digests}}
        if sum(map(len, of_boundary.values())) < self.world_size:
            newest = sorted({*self.reported, this})[-KEPT:]
            reported = {**self.reported, this: of_boundary}
            return replace(self, reported={at: reported[at] for at in newest}), None
        after = replace(self, reported={at: parts for at, parts in self.reported.items() if at[0] > boundary})
        held_by = {other: theirs for of_part in of_boundary.values() for other, theirs in of_part.items()}
        look, unequal = self._compare(boundary, held_by, is_full)
        declared = {*shards, *self.replicas.shards}
        replicas = replace(
            self.replicas,
            differing={key: owners for key, owners in unequal.items() if key not in declared},
            shards={key: owners for key, owners in unequal.items() if key in declared},
            compared_at=boundary if is_full else self.replicas.compared_at,
        )
        is_agreed = look.divergence is None and (is_full or self.agreed_at is not None)
        return replace(after, replicas=replicas, agreed_at=boundary if is_agreed else self.agreed_at), look

    def _compare(
        self, boundary: int, held_by: Mapping[int, Mapping[str, Held]], is_full: bool
    ) -> tuple[Look, dict[str, tuple[int, ...]]]:
        differing = {**self.replicas.unequal}
        newly: dict[str, tuple[int, ...]] = {}
        odd: set[int] = set()
        is_undecided = False
        digests: tuple[str, ...] = ()
        for key in dict.fromkeys(key for rank in range(self.world_size) for key in held_by[rank]):
            by_rank = [held_by[rank].get(key) for rank in range(self.world_size)]
            if by_rank.count(by_rank[0]) == self.world_size:
                continue
            before = differing.get(key, (0,) * self.world_size)
            after = before
            alike: dict[int, list[int]] = {}
            for rank, owner in enumerate(before):
                alike.setdefault(owner, []).append(rank)
            for _, ranks in sorted(alike.items()):
                pairs = [by_rank[rank] for rank in ranks]
                if pairs.count(pairs[0]) == len(pairs):
                    continue
                if self.agreed_at is None or len({pair and pair[1] for pair in pairs}) > 1 or None in pairs:
                    after = split(after, ranks, pairs)
                    continue
                digests = digests or tuple(pair[0] if pair else "" for pair in by_rank)
                (common, times), *_ = Counter(pairs).most_common()
                if times * 2 > len(pairs):
                    odd |= {rank for rank in ranks if by_rank[rank] != common}
                else:
                    is_undecided = True
            if after != before:
                newly[key] = after
        differing |= newly
        divergence = None
        if (odd or is_undecided) and self.agreed_at is not None:
            ranks_odd = () if is_undecided else tuple(sorted(odd))
            divergence = Divergence(boundary=boundary, agreed_at=self.agreed_at, ranks=ranks_odd, digests=digests)
        return Look(boundary=boundary, is_full=is_full, differing=newly, divergence=divergence), differing


def split(owners: tuple[int, ...], ranks: Sequence[int], contents: Sequence[object]) -> tuple[int, ...]:
    """Replicas that have turned out to be none, each with those that still hold the same.

    ranks, contents   these ranks, and what each holds
    """
    first: dict[object, int] = {}
    after = list(owners)
    for rank, content in zip(ranks, contents, strict=True):
        after[rank] = first.setdefault(content, rank)
    return tuple(after)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which the journals of a group differ.

    ranks     that differ from the majority; () if there is none
    sentence  for an operator
    """

    ranks: tuple[int, ...]
    sentence: str


def find_difference(issued: Mapping[int, Mapping[str, Sequence[str]]]) -> Difference | None:
    """Compare the collectives of ranks that stand at one boundary; None if they agree as far as they have come.

    issued   rank -> group -> signatures of the collectives that it has issued since the boundary, oldest first
    """
    by_group: dict[str, dict[int, Sequence[str]]] = {}
    for rank, journal in sorted(issued.items()):
        for group, signatures in journal.items():
            by_group.setdefault(group, {})[rank] = signatures
    for _, journals in sorted(by_group.items()):
        for at in range(max(map(len, journals.values()))):
            here = {rank: signatures[at].strip() for rank, signatures in journals.items() if len(signatures) > at}
            (usual, times), *others = Counter(here.values()).most_common()
            if others:
                odd = tuple(rank for rank, signature in here.items() if signature != usual)
                first, other = odd[0], next(rank for rank, signature in here.items() if signature == usual)
                what = f"rank {first} has issued '{here[first]}' where rank {other} has '{usual}'"
                return Difference(odd if 2 * times > len(here) else (), f"{what}, as number {at + 1} of the step")
    return None


Rows = Sequence[tuple[str, str, str]]
Layouts = Mapping[str, Sequence[tuple[str, int]]]
_WHOLE_DIGITS = 16  # of a digest, before those of its parts
_ROUNDING = 1e-3  # of the sum of all elements: kernels that are not reproducible differ by much less


class Judgement(NamedTuple):
    """What is found of a step that was taken several times from the same state.

    finding   "equal"; "again": it is to be taken once more; "suspect": two others agree against the rank; "other": the
              first other one was wrong; all differ: "rounding", or "inconclusive"
    what      what differs first, in words; "" if nothing does
    """

    finding: str
    what: str = ""


def judge(taken: Sequence[Rows], layouts: Layouts) -> Judgement:
    """Judge a step.

    taken    the rank's own, and then one or two others': what was computed, its digest, the sum of its elements
    layouts  see `SnapshotTaken`
    """
    own, first, *rest = taken
    if own == first:
        return Judgement("equal")
    what = _first_difference(own, first, layouts)
    if not rest:
        return Judgement("again", what)
    if rest[0] in (own, first):
        return Judgement("suspect" if rest[0] == first else "other", what)
    is_near = _are_near(own, first) and _are_near(own, rest[0])
    return Judgement("rounding" if is_near else "inconclusive", what)


def _first_difference(own: Rows, other: Rows, layouts: Layouts) -> str:
    pairs = zip_longest(own, other, fillvalue=("", "", ""))
    differing = [(mine, theirs) for mine, theirs in pairs if mine != theirs]
    (what, here, _), (instead, there, _) = differing[0]
    if names := _first_part(layouts.get(what, ()), here, there):
        what = f"the gradient of {names} ({what})"
    return (what or instead) + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")


def _first_part(layout: Sequence[tuple[str, int]], here: str, there: str) -> str:
    """The parameters that are in the first part that differs, "first" or "first to last"; "" if it is not known.

    here, there   digest of the whole, and those of its parts; DDP reduces first what is computed first
    """
    digits, total = range(_WHOLE_DIGITS, len(here), PART_DIGITS), sum(size for _, size in layout)
    differing = [at for at, digit in enumerate(digits) if here[digit:][:PART_DIGITS] != there[digit:][:PART_DIGITS]]
    begin, end = (total * (at + more) / PARTS for at in differing[:1] or (PARTS,) for more in (0, 1))
    ends = accumulate(size for _, size in layout)
    names = [name for (name, size), upto in zip(layout, ends, strict=True) if begin < upto and upto - size < end]
    return " to ".join(dict.fromkeys((*names[:1], *names[-1:])))


def _are_near(own: Rows, other: Rows) -> bool:
    """Whether the same things were computed, and are equal to rounding as far as their sums show."""
    if [row[0] for row in own] != [row[0] for row in other]:
        return False
    sums = [(float(mine[2]), float(theirs[2])) for mine, theirs in zip(own, other, strict=True) if mine[2]]
    return all(isclose(here, there, rel_tol=_ROUNDING) for here, there in sums)
