"""The nodes of what has not changed since an earlier boundary, whatever it is made of.

A walk notes what each node depends on (`Trace`): the containers and objects that it has met, whose changes can be told,
and how many things it has met whose changes cannot ("open" ones: tensors, generators, files, ...). `Names` remembers
the names of one dictionary, a scope's or an object's, from boundary to boundary: those whose values hold nothing open
are kept, and are not walked over again while nothing in them has changed (`Kept`).

An object in what is kept has the same number at each boundary. What is kept is valid in a walk only if none of its
objects was met before in this walk, and all objects that it refers to were, with the same numbers. Begin with
`Names.nodes`.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ttprun.capture.records.nodes import FixedNode
from ttprun.capture.records.packing import pack
from ttprun.capture.values.nodes import SETTLED
from ttprun.capture.values.unchanged import ARE_COUNTED, Unchanged, version_of
from ttprun.introspect.looks import dictionary_getter, dictionary_of, dictionary_of_class, is_a

if TYPE_CHECKING:
    from ttprun.capture.values.snapshot import Snapshot

_FOLLOWED: dict[type, int] = {list: 4096, dict: 4096, OrderedDict: 1024, set: 512, deque: 512}  # with how many items
_STRIKES = 3  # how often something in a name's value may have changed before it is walked over at each boundary
_next = 1 << 24  # the next of the numbers that last; above all numbers of a single walk


def lasting_numbers(count: int) -> int:
    """The first of so many numbers that no other object has at any boundary."""
    global _next
    first, _next = _next, _next + count
    return first


class Trace:
    """What the nodes that a walk has made depend on.

    open       how many things were met of which not every change can be told
    contents   the lists, dictionaries and sets met
    typed      objects met whose type counts
    owners     of these, those whose dictionary of attributes counts
    held       these dictionaries
    watched    functions and classes of the script's, which have no attributes yet
    referred   (id, number) of objects that had been met before
    """

    __slots__ = ("contents", "held", "open", "owners", "referred", "typed", "watched")

    def __init__(self) -> None:
        self.open = 0
        self.contents: list[Any] = []
        self.typed: list[Any] = []
        self.owners: list[Any] = []
        self.held: list[dict[str, Any]] = []
        self.watched: list[Any] = []
        self.referred: list[tuple[int, int]] = []

    def container(self, value: Any) -> None:
        """A container was met."""
        most = _FOLLOWED.get(type(value))
        if most is None or len(value) > most:
            self.open += 1
            return
        self.contents.append(value)
        if type(value) is OrderedDict and (held := dictionary_of(value)) is not None:
            self.object(value, held)

    def object(self, value: Any, held: dict[str, Any]) -> None:
        """An object was met whose attributes are all in a dictionary."""
        self.typed.append(value)
        self.owners.append(value)
        self.held.append(held)
        self.contents.append(held)

    def since(self, marks: tuple[int, ...]) -> tuple[list[Any], ...]:
        """What was added to each list since `marks`."""
        return tuple(one[mark:] for one, mark in zip(self._lists(), marks, strict=True))

    def marks(self) -> tuple[int, ...]:
        """Where the lists end now."""
        return tuple(map(len, self._lists()))

    def add(self, parts: tuple[list[Any], ...]) -> None:
        """Add what `since` has returned."""
        for one, part in zip(self._lists(), parts, strict=True):
            one += part

    def _lists(self) -> tuple[list[Any], ...]:
        return self.contents, self.typed, self.owners, self.held, self.watched, self.referred


class Kept:
    """The nodes of the values of some names.

    names, values   one each
    nodes           by name
    traced          what they depend on, as `Trace.since` returns it
    objects         those that have a number, in the order in which they were met
    numbers         of these, by their ids
    elsewhere       numbers of the objects that are only referred to, by their ids
    parts           the same of each name alone; empty if there is one name
    """

    __slots__ = (
        *("_getters", "_packed", "_sizes", "_types", "_unchanged", "elsewhere", "names", "nodes", "numbers"),
        *("objects", "parts", "traced", "values"),
    )

    def __init__(self, nodes: dict[str, Any], values: list[Any], traced: tuple[list[Any], ...]) -> None:
        self.names, self.values, self.nodes = list(nodes), values, nodes
        self.traced = traced
        self.parts: list[Kept] = []
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.elsewhere: dict[int, int] = {}
        self._unchanged = Unchanged()
        self._types: list[type] = []
        self._getters: list[Any] = []
        self._sizes: list[int] = []
        self._packed: FixedNode | None = None

    @classmethod
    def of(cls, name: str, value: Any, node: Any, marks: tuple[int, ...], snapshot: Snapshot) -> Kept:
        """What a walk has just found of one name.

        marks   where the walk's trace and, last, its list of objects ended before
        """
        contents, typed, owners, held, watched, referred = snapshot.trace.since(marks[:-1])
        watched = list({id(one): one for one in watched}.values())
        made = cls({name: node}, [value], (contents, typed, owners, held, watched, referred))
        numbers = snapshot.numbers
        made.objects = [one for one in snapshot.alive[marks[-1] :] if numbers.get(id(one)) is not None]
        made.numbers = {id(one): number for one in made.objects if (number := numbers[id(one)]) is not None}
        made.elsewhere = {key: number for key, number in referred if key not in made.numbers}
        made._unchanged = Unchanged(contents)
        made._types = list(map(type, typed))
        made._getters = [dictionary_getter(type(one)) for one in owners]
        made._sizes = [0 if is_a(one, FunctionType) else len(dictionary_of_class(one)) for one in watched]
        return made

    @classmethod
    def joined(cls, parts: list[Kept]) -> Kept | None:
        """Several as one; those are left out whose references do not fit to the others. None if none is left."""
        parts = _fitting(parts)
        if not parts:
            return None
        traced = tuple(list(chain(*lists)) for lists in zip(*(part.traced for part in parts), strict=True))
        nodes = {name: node for part in parts for name, node in part.nodes.items()}
        made = cls(nodes, [value for part in parts for value in part.values], traced)
        made.parts = parts
        made.objects = [one for part in parts for one in part.objects]
        made.numbers = {key: number for part in parts for key, number in part.numbers.items()}
        referred = (item for part in parts for item in part.elsewhere.items())
        made.elsewhere = {key: number for key, number in referred if key not in made.numbers}
        made._unchanged = Unchanged.joined([part._unchanged for part in parts])
        made._types = [one for part in parts for one in part._types]
        made._getters = [one for part in parts for one in part._getters]
        made._sizes = [one for part in parts for one in part._sizes]
        return made

    @property
    def packed(self) -> FixedNode:
        """The nodes, packed once."""
        if self._packed is None:
            self._packed = FixedNode(pack(self.nodes))
        return self._packed

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether this walk would find the same nodes."""
        return (
            self.is_unchanged()
            and (not self.numbers or self._is_new_to(snapshot))
            and (not self.elsewhere or self.elsewhere.items() <= snapshot.numbers.items())
        )

    def is_unchanged(self) -> bool:
        """Whether nothing has changed that the nodes depend on."""
        _, typed, owners, held, watched, _ = self.traced
        try:
            return (
                self._unchanged.holds()
                and (not typed or all(map(is_, map(type, typed), self._types)))
                and (not owners or all(map(is_, map(operator.call, self._getters, owners), held)))
                and (not watched or list(map(_size_of, watched)) == self._sizes)
            )
        except RuntimeError:  # another thread is changing it
            return False

    def _is_new_to(self, snapshot: Snapshot) -> bool:
        own = self.numbers.keys()
        return own.isdisjoint(snapshot.numbers.keys()) and all(own.isdisjoint(rows.keys()) for rows in snapshot.rows)

    def enter(self, snapshot: Snapshot) -> None:
        """The walk has met all of it."""
        if self.numbers:
            snapshot.numbers.update(self.numbers)
            snapshot.alive += self.objects
        snapshot.trace.add(self.traced)

    def holding(self, snapshot: Snapshot) -> list[Kept]:
        """Those of the parts that hold."""
        fine = [part for part in self.parts if part.is_unchanged() and part._is_new_to(snapshot)]
        return _fitting(fine, snapshot.numbers)


def _fitting(parts: list[Kept], met: Mapping[int, int | None] | None = None) -> list[Kept]:
    """Those of the parts that refer to nothing but what is in earlier ones, or elsewhere.

    met   the numbers of what is elsewhere; None: they are not looked at
    """
    found, own = [], {key for part in parts for key in part.numbers}
    seen: dict[int, int] = {}
    for part in parts:
        if all(
            seen.get(key) == number if key in own or key in seen else met is None or met.get(key) == number
            for key, number in part.elsewhere.items()
        ):
            found.append(part)
            seen.update(part.numbers)
    return found


def _size_of(one: Any) -> int:
    return len(one.__dict__ if is_a(one, FunctionType) else dictionary_of_class(one))


class Names:
    """What is remembered of the names of one dictionary.

    choose   which names of the dictionary are recorded
    number   of the object whose attributes these are, at each boundary
    owner    its id; 0 if it is not known yet
    kept     what of it is not walked over; None if nothing
    entered  the same in the newest walk
    rest     the other names
    """

    __slots__ = (
        *("_all", "_chosen", "_hints", "_strikes", "_version", "choose", "entered", "kept", "number", "owner", "rest"),
    )

    def __init__(self, choose: Callable[[dict[str, Any]], list[str]]) -> None:
        self.choose = choose
        self.number = lasting_numbers(1)
        self.owner = 0
        self.kept: Kept | None = None
        self.entered: Kept | None = None
        self.rest: list[str] = []
        self._all: list[Any] | None = None
        self._chosen: list[str] = []
        self._version = -1
        self._hints: dict[str, int] = {}  # ids of values in which nothing open was found at the boundary before
        self._strikes: Counter[str] = Counter()

    def nodes(self, snapshot: Snapshot, scope: dict[str, Any], depth: int, is_lasting: bool) -> dict[str, Any]:
        """The nodes of the names in `rest`; what is in `kept` has entered the walk.

        scope        with the values now
        depth        of the values
        is_lasting   it is the same dictionary at each boundary, not a copy
        """
        version = version_of(scope) if is_lasting and ARE_COUNTED else -1
        if version == -1 or version != self._version:
            self._look_at(scope)
            self._version = version
        if self.kept is not None:
            if not self.kept.holds(snapshot):
                self._keep(self.kept.holding(snapshot))
            if self.kept is not None:
                self.kept.enter(snapshot)
        self.entered = self.kept
        return self._walk(snapshot, scope, depth) if self.rest else {}

    def _look_at(self, scope: dict[str, Any]) -> None:
        """Find the names that are new, gone, or have another value."""
        names, kept = list(scope), self.kept
        is_named_alike = names == self._all
        if not is_named_alike:
            self._all, self._chosen = names, self.choose(scope)
        if kept is not None and not all(map(is_, map(scope.get, kept.names), kept.values)):
            other = {name for name, value in zip(kept.names, kept.values, strict=True) if scope.get(name) is not value}
            self._strikes.update(dict.fromkeys(other, _STRIKES))
            kept = Kept.joined([part for part in kept.parts if part.names[0] not in other])
        elif is_named_alike:
            return
        elif kept is not None and not scope.keys() >= set(kept.names):  # one that is None
            kept = Kept.joined([part for part in kept.parts if part.names[0] in scope])
        self._set(kept)

    def _set(self, kept: Kept | None) -> None:
        self.kept = kept
        self.rest = [name for name in self._chosen if kept is None or name not in kept.nodes]

    def _keep(self, parts: list[Kept]) -> None:
        """Go on with these parts; each other name gets a strike."""
        kept = Kept.joined(parts)
        lost = set(self.kept.names if self.kept is not None else ()) - set(kept.names if kept is not None else ())
        self._strikes.update(lost)
        self._set(kept)

    def _walk(self, snapshot: Snapshot, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        new: list[Kept] = []
        trace, strikes, hints = snapshot.trace, self._strikes, self._hints
        for name in self.rest:
            value = scope[name]
            if snapshot.is_keeping or (name in strikes and strikes[name] >= _STRIKES):
                found[name] = value if type(value) in SETTLED else snapshot.node(value, depth)
                continue
            before = trace.open
            if hints.get(name) == id(value):
                marks = (*trace.marks(), len(snapshot.alive))
                found[name] = node = snapshot.kept_node(value, depth)
                if trace.open == before:
                    new.append(Kept.of(name, value, node, marks, snapshot))
            else:
                found[name] = snapshot.node(value, depth)
            if trace.open == before:
                hints[name] = id(value)
            elif name in hints:
                del hints[name]
        if new:
            self._set(Kept.joined([*(self.kept.parts if self.kept is not None else ()), *new]))
        return found
