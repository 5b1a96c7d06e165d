"""The nodes of what has not changed since an earlier boundary, whatever it is made of.

A walk notes what each node depends on (`Trace`): the containers and objects that it has met, whose changes can be seen,
and how many things it has met whose changes cannot ("open" ones: tensors, generators, files, ...). `Names` remembers
the names of one dictionary, a scope's or an object's, from boundary to boundary: those whose values hold nothing open
are kept, and are not walked over again while nothing in them has changed (`Kept`).

An object in what is kept has the same number at each boundary. What is kept is valid in a walk only if none of its
objects was met before in this walk, and all objects that it refers to were, with the same numbers. Begin with
`Names.nodes`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_
from time import thread_time_ns
from typing import Any, NamedTuple

from ttprun.capture.records.nodes import FixedNode
from ttprun.capture.records.packing import SETTLED, pack
from ttprun.capture.values.changes import ARE_COUNTED, BASES, Clock, Piece, Slots, version_of
from ttprun.introspect.safe_reads import dictionary_of, slots_of

Snapshot = Any  # snapshot.py imports this module


_FOLLOWED: dict[type, int] = {list: 4096, dict: 4096, OrderedDict: 1024, set: 512, deque: 512}  # with how many items
_STRIKES = 3  # how often something in a name's value may have changed before it is walked over at each boundary
_AGAIN = (16, 1024)  # boundaries until such names are tried once more: at first, and at most
_WITHOUT_ATTRIBUTES = {list, dict, set, deque}
_PRICED = 2  # a variable (0), its attributes, and theirs: what is deeper is left alone with these
TOO_DEAR = "it takes too long to record at each step, so it is not recorded"
_next = 1 << 24  # the next of the numbers that last; above all numbers of a single walk


def lasting_numbers(count: int) -> int:
    """The first of so many numbers that no other object has at any boundary."""
    global _next
    first, _next = _next, _next + count
    return first


class Trace:
    """What the nodes that a walk has made depend on.

    open       how many things were met of which not every change can be seen
    contents   the lists, dictionaries, sets and deques met, the dictionaries of classes, and objects' slots (`Slots`)
    objects    (object, dictionary of its attributes) of those that have all attributes there
    typed      further objects, of which the type counts
    referred   (id, number) of objects that had been met before
    """

    __slots__ = ("contents", "objects", "open", "referred", "typed")

    def __init__(self) -> None:
        self.open = 0
        self.contents: list[Any] = []
        self.objects: list[tuple[Any, dict[str, Any]]] = []
        self.typed: list[Any] = []
        self.referred: list[tuple[int, int]] = []

    def add(self, other: Trace) -> None:
        """Add what further nodes depend on, but for what they refer to."""
        self.contents += other.contents
        self.objects += other.objects
        self.typed += other.typed

    def marks(self) -> tuple[int, ...]:
        """Where a walk is, for `since`."""
        return tuple(map(len, (self.contents, self.objects, self.typed, self.referred)))

    def since(self, marks: tuple[int, ...]) -> Trace:
        """What the nodes since then depend on."""
        made = Trace()
        made.contents, made.objects = self.contents[marks[0] :], self.objects[marks[1] :]
        made.typed, made.referred = self.typed[marks[2] :], self.referred[marks[3] :]
        return made


class Kept(Piece):
    """The nodes of the values of some names, and what they depend on.

    names, values   one each
    nodes           by name
    trace           what they depend on
    alive           the objects that have a number, in the order in which they were met
    elsewhere       numbers of the objects that are only referred to, by their ids
    depends         it has any of these; else it is of values that never change
    parts           the same of each name alone; empty if there is one name
    """

    __slots__ = ("_packed", "alive", "depends", "elsewhere", "names", "nodes", "parts", "trace", "values")

    def __init__(self, nodes: dict[str, Any], values: list[Any]) -> None:
        super().__init__()
        self.names, self.values, self.nodes = list(nodes), values, nodes
        self.trace = Trace()
        self.alive: list[Any] = []
        self.elsewhere: dict[int, int] = {}
        self.parts: list[Kept] = []
        self._packed: FixedNode | None = None

    @classmethod
    def of(cls, name: str, value: Any, node: Any, marks: tuple[int, ...], snapshot: Snapshot) -> Kept | None:
        """What a walk has just found of one name. None if not every change of it can be seen.

        marks   where the walk was before: those of its trace, and how many objects it had met
        """
        made = cls({name: node}, [value])
        made.trace = snapshot.trace.since(marks)
        if not all(map(_may_be_followed, made.trace.contents)):
            return None
        made.trace.objects = list({id(pair[0]): pair for pair in made.trace.objects}.values())
        made.trace.objects += attributes_of_containers(made.trace.contents)
        made.alive = [item for item in snapshot.alive[marks[4] :] if snapshot.numbers.get(id(item)) is not None]
        made.numbers = {id(item): snapshot.numbers[id(item)] for item in made.alive}
        made._note_elsewhere(made.trace.referred)
        made.follow(made.trace)
        return made

    @classmethod
    def joined(cls, parts: list[Kept]) -> Kept | None:
        """Several as one; those are left out whose references do not fit to the others. None if none is left."""
        parts = _fitting(parts)
        if not parts:
            return None
        nodes = {name: node for part in parts for name, node in part.nodes.items()}
        made = cls(nodes, [value for part in parts for value in part.values])
        made.parts = parts
        for part in parts:
            made.trace.add(part.trace)
            made.alive += part.alive
            made.numbers.update(part.numbers)
            made.join(part)
        made._note_elsewhere([item for part in parts for item in part.elsewhere.items()])
        return made

    def _note_elsewhere(self, referred: list[tuple[int, int]]) -> None:
        self.elsewhere = {key: number for key, number in referred if key not in self.numbers}
        self.depends = bool(self.trackers or self.alive or self.elsewhere)

    @property
    def packed(self) -> FixedNode:
        """The nodes, packed once."""
        if self._packed is None:
            self._packed = FixedNode(pack(self.nodes))
        return self._packed

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether this walk would find the same nodes."""
        if self.trackers and not (self.holds() and (not self.numbers or self.is_apart(snapshot))):
            return False
        return not self.elsewhere or self.elsewhere.items() <= snapshot.numbers.items()

    def enter(self, snapshot: Snapshot) -> None:
        """The walk has met all of it."""
        trace, own = snapshot.trace, self.trace
        if self.numbers:
            snapshot.numbers.update(self.numbers)
            snapshot.alive += self.alive
        trace.contents += own.contents  # and no call: this is done for each object at each boundary
        trace.objects += own.objects
        trace.typed += own.typed
        if self.elsewhere:
            trace.referred += self.elsewhere.items()

    def holding(self, snapshot: Snapshot) -> list[Kept]:
        """Those of the parts that hold."""
        return _fitting([part for part in self.parts if part.holds() and part.is_apart(snapshot)], snapshot.numbers)


def attributes_of_containers(containers: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """(container, its dictionary) of those of a subclass that have attributes, too."""
    return [
        (container, attributes)
        for container in containers
        if type(container) not in _WITHOUT_ATTRIBUTES and (attributes := dictionary_of(container)) is not None
    ]


def _may_be_followed(container: Any) -> bool:
    """Whether each change of a container can be seen, and soon enough."""
    kind = type(container)
    if kind is Slots:
        return True
    if kind in _FOLLOWED:
        return len(container) <= _FOLLOWED[kind]
    base = next((base for base in BASES if issubclass(kind, base)), None)
    return (
        base is not None
        and not slots_of(kind)
        and base.__len__(container) <= min(_FOLLOWED[base], _FOLLOWED[OrderedDict])
    )


def _fitting(parts: list[Kept], met: Mapping[int, int | None] | None = None) -> list[Kept]:
    """Those of the parts that refer to nothing but what is in earlier ones, or elsewhere.

    met   the numbers of what is elsewhere; None: they are not looked at
    """
    fitting, own = [], {key for part in parts for key in part.numbers}
    seen: dict[int, int] = {}
    for part in parts:
        if all(
            seen.get(key) == number if key in own else met is None or met.get(key) == number
            for key, number in part.elsewhere.items()
        ):
            fitting.append(part)
            seen.update(part.numbers)
    return fitting


class Price(NamedTuple):
    """What the walk over one name's value has taken.

    first     number of the first price, among all of the walk, of what is in this value
    met       objects that were met in it
    """

    names: Names
    name: str
    value: Any
    taken_ns: int
    first: int
    met: list[Any]


class Names:
    """What is remembered of the names of one dictionary.

    choose   which names of the dictionary are recorded
    left     type of each value that is left alone (`leave`)
    kept     what of it is not walked over; None if nothing
    late     the same of names whose values refer to what is met among the others
    entered  `kept` in the newest walk
    rest     the other names
    """

    __slots__ = (
        *("_again", "_all", "_chosen", "_hints", "_pause", "_settled", "_strikes", "_version"),
        *("choose", "entered", "kept", "late", "left", "rest"),
    )

    def __init__(
        self, choose: Callable[[dict[str, Any]], list[str]], left_alone: dict[str, type] | None = None
    ) -> None:
        self.choose = choose
        self.left = {} if left_alone is None else left_alone
        self.kept: Kept | None = None
        self.late: Kept | None = None
        self.entered: Kept | None = None
        self.rest: list[str] = []
        self._all: list[Any] | None = None
        self._chosen: list[str] = []
        self._version = -1
        self._settled: dict[str, Any] = {}  # values at the boundary before that can never change
        self._hints: dict[str, int] = {}  # ids of others in which nothing open was found then
        self._strikes: Counter[str] = Counter()
        self._pause = _AGAIN[0]
        self._again = Clock.boundary + self._pause  # when names with many strikes are tried once more

    def nodes(self, snapshot: Snapshot, scope: dict[str, Any], depth: int, is_lasting: bool) -> dict[str, Any]:
        """The nodes of all names but those in `entered`, which has entered the walk.

        scope        with the values now
        depth        of the values
        is_lasting   it is the same dictionary at each boundary, not a copy
        """
        version = version_of(scope) if is_lasting and ARE_COUNTED else -1
        if version == -1 or version != self._version:
            self._look_at(scope)
            self._version = version
        if self.kept is not None and self.kept.depends:
            if not self.kept.fits(snapshot):
                self._keep(self.kept, self.kept.holding(snapshot))
            if self.kept is not None:
                self.kept.enter(snapshot)
        self.entered = self.kept
        walk = self._walk if snapshot.prices is None or depth > _PRICED else self._walk_priced
        nodes = walk(snapshot, scope, depth, self.rest) if self.rest else {}
        if self.late is not None:
            nodes |= self._nodes_of_late(self.late, snapshot, scope, depth)
        if self.left:
            nodes |= self._nodes_of_left(snapshot, scope, depth)
        return nodes

    def leave(self, name: str, kind: type) -> None:
        """From now on a name's values of this type are left alone."""
        self.left[name] = kind
        self._all, self._version = None, -1
        self._set(None, None)

    def _nodes_of_left(self, snapshot: Snapshot, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        return {
            name: snapshot.unproved(kind, TOO_DEAR) if type(value) is kind else snapshot.node(value, depth)
            for name, kind in self.left.items()
            if (value := scope.get(name, snapshot)) is not snapshot
        }

    def _walk_priced(self, snapshot: Snapshot, scope: dict[str, Any], depth: int, names: list[str]) -> dict[str, Any]:
        nodes: dict[str, Any] = {}
        for name in names:
            first, met, since = len(snapshot.prices), len(snapshot.alive), thread_time_ns()
            nodes |= self._walk(snapshot, scope, depth, [name])
            taken_ns = thread_time_ns() - since
            snapshot.prices.append(Price(self, name, scope[name], taken_ns, first, snapshot.alive[met:]))
        return nodes

    def _look_at(self, scope: dict[str, Any]) -> None:
        """Find the names that are new, gone, or have another value."""
        names = list(scope)
        is_named_alike = names == self._all
        if not is_named_alike:
            self._all, self._chosen = names, [name for name in self.choose(scope) if name not in self.left]
        kept, late = self.kept, self.late
        if kept is not None:
            kept = self._without_others(kept, scope)
        if late is not None:
            late = self._without_others(late, scope)
        if not is_named_alike or kept is not self.kept or late is not self.late:
            self._set(kept, late)

    def _without_others(self, kept: Kept, scope: dict[str, Any]) -> Kept | None:
        if all(map(is_, map(scope.get, kept.names, repeat(kept)), kept.values)):
            return kept
        other = {name for name, value in zip(kept.names, kept.values, strict=True) if scope.get(name) is not value}
        self._strikes.update(dict.fromkeys(other, _STRIKES))
        return Kept.joined([part for part in kept.parts if part.names[0] in scope and part.names[0] not in other])

    def _set(self, kept: Kept | None, late: Kept | None) -> None:
        self.kept, self.late = kept, late
        taken = {*(() if kept is None else kept.nodes), *(() if late is None else late.nodes)}
        self.rest = [name for name in self._chosen if name not in taken]

    def _keep(self, kept: Kept, parts: list[Kept]) -> None:
        """Go on with these parts; what refers to things that have not been met yet is late, others get a strike."""
        lost = [part for part in kept.parts if part not in parts]
        late = [part for part in lost if part.elsewhere and part.holds()]
        self._strikes.update(part.names[0] for part in lost if part not in late)
        if late:
            late = [*(() if self.late is None else self.late.parts), *late]
        self._set(Kept.joined(parts), Kept.joined(late) if late else self.late)

    def _nodes_of_late(self, late: Kept, snapshot: Snapshot, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        if late.fits(snapshot):
            late.enter(snapshot)
            return late.nodes
        holding = Kept.joined(late.holding(snapshot))
        nodes: dict[str, Any] = {}
        if holding is not None:
            holding.enter(snapshot)
            nodes |= holding.nodes
        lost = [name for name in late.names if name not in nodes]
        self._strikes.update(lost)
        self._set(self.kept, holding)
        return nodes | self._walk(snapshot, scope, depth, lost)

    def _try_again(self) -> None:
        """A script's first boundaries change what is never changed later."""
        self._pause = min(2 * self._pause, _AGAIN[1])
        self._again = Clock.boundary + self._pause
        for name in self._strikes:
            self._strikes[name] = min(self._strikes[name], _STRIKES - 1)

    def _walk(self, snapshot: Snapshot, scope: dict[str, Any], depth: int, names: list[str]) -> dict[str, Any]:
        nodes: dict[str, Any] = {}
        new: list[Kept] = []
        trace, strikes, hints = snapshot.trace, self._strikes, self._hints
        if Clock.boundary >= self._again and strikes:
            self._try_again()
        settled = self._settled
        for name in names:
            value = scope[name]
            if type(value) in SETTLED and not (name in settled and settled[name] is value):
                nodes[name] = settled[name] = value
                continue
            if name in settled and settled[name] is not value:
                del settled[name]
            if snapshot.is_keeping or (name in strikes and strikes[name] >= _STRIKES):
                nodes[name] = value if type(value) in SETTLED else snapshot.node(value, depth)
                continue
            before, key = trace.open, id(value)
            if type(value) in SETTLED or (name in hints and hints[name] == key):
                marks = (*trace.marks(), len(snapshot.alive))
                nodes[name] = node = snapshot.kept_node(value, depth)
                if trace.open == before:
                    made = Kept.of(name, value, node, marks, snapshot)
                    new += [made] if made is not None else []
                    strikes[name] += _STRIKES if made is None else 0
            else:
                nodes[name] = snapshot.node(value, depth)
            if trace.open == before:
                hints[name] = key
            elif name in hints:
                del hints[name]
        if new:
            self._set(Kept.joined([*(self.kept.parts if self.kept is not None else ()), *new]), self.late)
        return nodes
