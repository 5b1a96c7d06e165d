"""Random variables, changed at random from boundary to boundary: each record equals that of a walk that keeps nothing.

Nothing of this may be kept too long: nodes of names, runs of items, trees of data, hashes of small tensors and arrays
and of large ones. The fresh walk meets all in the same order. At a boundary at which not everything is looked at, what
differs must have an age.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.capture import user_values
from tests.capture.records import record_of
from tests.capture.user_values import Bare, FrozenState, Meter, NamedCounts, Point
from tests.capture.values.carrying import Scope, as_the_recorder_writes_them, look_at_few
from ttprun.capture import values
from ttprun.capture.records.nodes import AnyNode, RefusedNode
from ttprun.capture.values import Snapshot, arrays, changes, containers, data_trees, kept, large, long_items, tensors
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.snapshot import _numbers
from ttprun.capture.values.trees import Comparison, number_of, parts

BOUNDARIES = 60
QUIET = 0.6  # of the boundaries have no change before them
NOTHING: dict[int, int] = {}
NAMES = [f"x{number}" for number in range(8)]


class Script:
    """A script's variables: those of two functions, and of a module.

    pool   objects that are or were in some variable, from which new places are filled
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool: list[Any] = []
        self.scopes: list[Scope] = [{}, {}, {}]
        for scope in self.scopes:
            scope.update({name: self.value() for name in NAMES[:5]})

    def value(self, depth: int = 0) -> Any:
        drawn = self.random.random()
        if depth > 3 or drawn < 0.4:
            return self.random.choice([self.random.randrange(3), self.random.random(), "a", "b", None, True, -1.5])
        if drawn < 0.6 and self.pool:
            return self.random.choice(self.pool)
        made = self.random.choice(MAKERS)(self, depth)
        self.pool.append(made)
        return made

    def values(self, depth: int, most: int = 4) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self.random.randrange(most))]

    def named(self, names: str, depth: int) -> dict[str, Any]:
        return {self.random.choice(names): value for value in self.values(depth)}

    def change(self) -> None:
        """Change one object or scope, at whatever depth."""
        found = [one for one in reached(self.scopes) if type(one) in CHANGES]
        self.pool = [one for one in found if not any(one is scope for scope in self.scopes)]
        value = self.value()
        kind = self.random.choice(list({type(each): None for each in found}))
        alike = [each for each in found if type(each) is kind]
        target = self.random.choice(alike if self.random.random() < 0.75 else self.scopes)
        if not any(target is scope for scope in self.scopes):
            CHANGES[type(target)](self, target, value)
        elif self.random.random() < 0.2 and len(target) > 1:
            del target[self.random.choice(list(target))]
        else:
            target[self.random.choice(NAMES)] = value


def _object(script: Script, depth: int) -> Bare:
    made = Bare()
    vars(made).update(script.named("pqrst", depth))
    return made


def _many(make: Callable[[Script, int], Any]) -> Callable[[Script, int], Any]:
    return lambda script, depth: [make(script, depth) for _ in range(script.random.choice([5, 14, 14, 25]))]


def _large(script: Script, depth: int) -> Any:
    """Elements that are compared, not recorded."""
    filled = numpy.arange(20_000, dtype="float32") + script.random.randrange(5)
    return filled if script.random.random() < 0.5 else torch.from_numpy(filled)


def _tensor(script: Script, depth: int) -> torch.Tensor:
    whole = torch.arange(4.0) + script.random.randrange(5)
    views = [one for one in script.pool if type(one) is torch.Tensor and one.numel() == len(whole)]
    return script.random.choice(views)[1:3] if views and script.random.random() < 0.3 else whole


MAKERS: list[Callable[[Script, int], Any]] = [
    *[lambda script, depth: script.values(depth)] * 4,
    *[lambda script, depth: script.named("abcdef", depth)] * 4,
    *[_object] * 6,
    *[_tensor] * 2,
    *[_large] * 2,
    lambda script, depth: numpy.arange(4.0) + script.random.randrange(5),
    *[_many(lambda script, depth: script.random.randrange(3))] * 3,
    *[_many(lambda script, depth: [script.value(4), script.value(4)])] * 2,
    *[_many(lambda script, depth: {"a": script.value(4), "b": 2})] * 2,
    *[_many(lambda script, depth: torch.full((4,), script.random.random()))] * 2,
    *[_many(lambda script, depth: numpy.full(4, script.random.random()))] * 2,
    _many(lambda script, depth: script.value(depth + 1)),
    lambda script, depth: {f"k{number}": script.value(depth + 2) for number in range(14)},
    lambda script, depth: set(range(script.random.randrange(12, 16))),
    lambda script, depth: OrderedDict(script.named("abcdef", depth)),
    lambda script, depth: NamedCounts(script.named("abcdef", depth)),
    lambda script, depth: {script.random.randrange(9) for _ in range(3)},
    lambda script, depth: deque(script.values(depth), maxlen=script.random.choice([None, 8])),
    lambda script, depth: tuple(script.values(depth, 3)),
    lambda script, depth: Point(*(script.value(depth + 1) for _ in range(2))),
    lambda script, depth: FrozenState(script.random.randrange(3), script.random.randrange(3)),
    lambda script, depth: functools.partial(user_values.wait_for, script.value(depth + 1)),
    lambda script, depth: Meter(),
    lambda script, depth: user_values.make_counter(),
]


def _change_list(script: Script, target: Any, value: Any) -> None:
    drawn = script.random.random()
    if len(target) > 6 or (target and drawn < 0.3):
        target.pop()
    elif target and drawn < 0.6:
        target[script.random.randrange(len(target))] = value
    elif drawn < 0.9:
        target.append(value)
    else:
        target.reverse()


def _change_dict(script: Script, target: Any, value: Any) -> None:
    if target and script.random.random() < 0.3:
        del target[script.random.choice(list(target))]
    else:
        target[script.random.choice("abcdef")] = value


def _change_object(script: Script, target: Any, value: Any) -> None:
    drawn = script.random.random()
    if drawn < 0.2 and vars(target):
        delattr(target, script.random.choice(list(vars(target))))
    elif drawn < 0.4:
        target.__dict__ = dict(vars(target))
    elif drawn < 0.5:
        vars(target)[script.random.choice("pqrst")] = value
    else:
        setattr(target, script.random.choice("pqrst"), value)


def _change_tensor(script: Script, target: Any, value: Any) -> None:
    if script.random.random() < 0.6:
        target.add_(1)
    else:
        target.data.mul_(2)  # which no version counts


def _change_array(script: Script, target: Any, value: Any) -> None:
    target[script.random.randrange(len(target))] += 1


def _change_set(script: Script, target: Any, value: Any) -> None:
    number = script.random.randrange(9)
    (target.discard if number in target else target.add)(number)


CHANGES: dict[type, Callable[[Script, Any, Any], None]] = {
    list: _change_list,
    deque: _change_list,
    dict: _change_dict,
    OrderedDict: _change_dict,
    NamedCounts: _change_dict,
    set: _change_set,
    Bare: _change_object,
    Meter: lambda script, target, value: target.update(script.random.random()),
    torch.Tensor: _change_tensor,
    numpy.ndarray: _change_array,
    type(user_values.make_counter()): lambda script, target, value: target(),
}


def _inner(one: Any) -> list[Any]:
    """What an object holds."""
    if type(one) in (dict, OrderedDict, NamedCounts):
        return [*one.values(), *vars(one).values()] if type(one) is NamedCounts else list(one.values())
    if isinstance(one, list | tuple | deque):
        return list(one)
    if isinstance(one, functools.partial):
        return list(one.args)
    return list(vars(one).values()) if type(one) in (Bare, Meter) else []


def reached(scopes: list[Scope]) -> Iterator[Any]:
    seen: set[int] = set()
    left: list[Any] = list(scopes)
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += _inner(one)


class Kept:
    """What the records of one script are compared with.

    orders   names of each scope, by its id, in the order in which the newest walk has met them
    roots    ids of what the newest walk has met as a tree of data
    apart    (id, part) of containers whose items were walked over one by one
    wholes   ids of the items of those that were asked for trees, and whether they hold some
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.orders: dict[int, list[str]] = {}
        self.roots: set[int] = set()
        self.apart: set[tuple[int, int]] = set()
        self.wholes: dict[tuple[int, ...], bool] = {}
        self._nodes, self._node_of, self._items = kept.Names.nodes, data_trees.node_of, long_items.kept_items
        patch.setattr(kept.Names, "nodes", lambda *given: self._note_order(*given))
        patch.setattr(containers, "node_of", self._note_root)
        patch.setattr(containers, "kept_items", self._note_items)
        patch.setattr(containers, "holds_trees", self._note_whole)

    def _note_order(self, names: kept.Names, snapshot: Snapshot, scope: Scope, *given: Any) -> dict[str, Any]:
        made = self._nodes(names, snapshot, scope, *given)
        self.orders[id(scope)] = [*(names.entered.nodes if names.entered else ()), *made]
        return made

    def _note_root(self, snapshot: Snapshot, value: Any) -> Any:
        made = self._node_of(snapshot, value)
        self.roots |= {id(value)} if made is not None else set()
        return made

    def _note_whole(self, items: Any) -> bool:
        return self.wholes.setdefault(tuple(map(id, items)), data_trees.holds_trees(items))

    def _note_items(self, snapshot: Snapshot, container: Any, items: Any, which: int = 0) -> Any:
        made = self._items(snapshot, container, items, which)
        if not snapshot.is_separate:
            (self.apart.discard if made is not None else self.apart.add)((id(container), which))
        return made

    @contextlib.contextmanager
    def nothing(self) -> Iterator[None]:
        """Keep nothing, and take the same for data that was taken for it."""
        orders = self.orders

        def nodes(names: kept.Names, snapshot: Snapshot, scope: Scope, depth: int, is_lasting: bool) -> dict[str, Any]:
            order = orders.get(id(scope), [])
            chosen = sorted(names.choose(scope), key=lambda name: order.index(name) if name in order else len(order))
            return {name: snapshot.node(scope[name], depth) for name in chosen}

        def node_of(snapshot: Snapshot, value: Any) -> Any:
            return self._node_of(snapshot, value) if id(value) in self.roots else None

        def items_of(snapshot: Snapshot, container: Any, items: Any, which: int = 0) -> Any:
            is_apart = not snapshot.is_separate and (id(container), which) in self.apart
            return None if is_apart else self._items(snapshot, container, items, which)

        def follow(value: Any) -> tuple[bytes, bool]:
            entry = large._met.get(id(value))
            return large.fingerprint_of_all(value), entry is not None and entry.is_changing

        with pytest.MonkeyPatch.context() as patch:
            for results in changes._all:
                for name in ("now", "before"):  # objects have the same numbers again
                    patch.setattr(results, name, dict(getattr(results, name)) if results is _numbers else {})
            patch.setattr(kept.Names, "nodes", nodes)
            patch.setattr(containers, "node_of", node_of)
            patch.setattr(containers, "kept_items", items_of)
            patch.setattr(containers, "holds_trees", lambda items: self.wholes.get(tuple(map(id, items)), False))
            patch.setattr(data_trees, "_left", data_trees._Left())
            patch.setattr(Clock, "records", 0)
            for module in (arrays, tensors):
                patch.setattr(module, "follow", follow)
            yield


def record(scopes: list[Scope]) -> values.Tree:
    """At a boundary: functions' variables come in a dictionary that is new, a module's in its own."""
    snapshot = Snapshot(NOTHING)
    *functions, module = scopes
    found = [snapshot.variables(scope, ("function", at)) for at, scope in enumerate(functions)]
    found.append(snapshot.variables(module, "module", is_lasting=True))
    fields = record_of(variables=[values.unpack_named(values.pack(scope)) for scope in found])
    return values.Tree(fields, as_the_recorder_writes_them(snapshot.blobs))


def nodes_of(tree: values.Tree) -> list[Any]:
    waiting = [node for scope in tree.variables for node in scope.values() if isinstance(node, AnyNode)]
    for node in waiting:
        waiting += [part for part in parts(node) if isinstance(part, AnyNode)]
    return waiting


def are_alike(first: values.Tree, last: values.Tree) -> bool:
    comparison = Comparison(first, last)
    return all(map(comparison.are_same_named, first.variables, last.variables))


def compare_at_each_boundary(seed: int, patch: pytest.MonkeyPatch) -> None:
    values.forget()
    script, walks = Script(seed), Kept(patch)
    for boundary in range(BOUNDARIES):
        if script.random.random() >= QUIET:
            for _ in range(script.random.randrange(1, 4)):
                script.change()
        values.begin_boundary()
        Clock.is_whole = script.random.random() < 0.5
        Clock.records = min(Clock.records, seed % 2 * 2)  # of every other script, what is new may be data
        walks.roots.clear()
        walks.wholes.clear()
        scopes = [*map(dict, script.scopes[:-1]), script.scopes[-1]]

        recorded = record(scopes)

        with walks.nothing():
            fresh = record(scopes)
        here = nodes_of(recorded)
        numbers = [number for node in here if (number := number_of(node)) is not None]
        assert len(numbers) == len(set(numbers)), f"seed {seed}, boundary {boundary}: two objects have one number"
        has_age = any(getattr(node, "age", 0) for node in here) and not Clock.is_whole
        is_refused = RefusedNode in map(type, here)  # what is in a refused container has no node
        is_same = are_alike(recorded, fresh) and are_alike(fresh, recorded)
        assert is_same or has_age or is_refused, f"seed {seed}, boundary {boundary}"


def compare_all(seeds: range) -> None:
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            if seed % 3 > 0:
                look_at_few(patch, 4)
                patch.setattr(changes, "_LONG", 8)
                for name, most in {"MANY": 12, "DATA_BYTES": 100, "_MANY_ROWS": 4, "SMALL_BYTES": 100}.items():
                    patch.setattr(data_trees, name, most)
            if seed % 5 == 0:
                patch.setattr(containers, "MANY_ROWS", 10)
                patch.setattr(containers, "MAX_ITEMS", 20)
                patch.setattr(long_items, "MAX_ITEMS", 20)
            for module in (changes, kept) if seed % 4 == 1 else ():  # where dictionaries have no versions
                patch.setattr(module, "ARE_COUNTED", False)
            compare_at_each_boundary(seed, patch)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    Clock.is_whole = False
    values.forget()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_record_is_what_the_variables_are_at_each_boundary(first: int) -> None:
    compare_all(range(first, first + 10))


@pytest.mark.parametrize(("of", "name"), [(changes.Piece, "holds"), (changes.LONG_LISTS, "are_same")])
def test_what_is_kept_too_long_is_noticed_here(of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, lambda *given: True)

    with pytest.raises(AssertionError):
        compare_all(range(10))
