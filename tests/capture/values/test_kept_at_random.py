"""Random variables, changed at random from boundary to boundary: each record says what is there, whatever was kept.

A record is compared with the variables themselves, as trees in which each object has the number of its first visit: so
which places share an object counts, and where it is defined in the record does not.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.capture import user_values
from tests.capture.user_values import Bare, FrozenState, Meter, NamedCounts, Point
from tests.capture.values.carrying import Scope, as_the_recorder_writes_them
from ttprun.capture import values
from ttprun.capture.records import nodes
from ttprun.capture.values import Snapshot, kept
from ttprun.capture.values.snapshot import with_fixed

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
        target = self.random.choice(found if self.random.random() < 0.75 else self.scopes)
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


def _tensor(script: Script, depth: int) -> torch.Tensor:
    whole = torch.arange(4.0) + script.random.randrange(5)
    views = [one for one in script.pool if type(one) is torch.Tensor and one.numel() == len(whole)]
    return script.random.choice(views)[1:3] if views and script.random.random() < 0.3 else whole


MAKERS: list[Callable[[Script, int], Any]] = [
    *[lambda script, depth: script.values(depth)] * 3,
    *[lambda script, depth: script.named("abcdef", depth)] * 3,
    *[_object] * 3,
    *[_tensor] * 2,
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
    elif drawn < 0.3:
        target.__dict__ = dict(vars(target))
    elif drawn < 0.4:
        vars(target)[script.random.choice("pqrst")] = value
    else:
        setattr(target, script.random.choice("pqrst"), value)


def _change_tensor(script: Script, target: Any, value: Any) -> None:
    if script.random.random() < 0.6:
        target.add_(1)
    else:
        target.data.mul_(2)  # which no version counts


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


class Tree:
    """A canonical form: tuples of a kind, the number of the first visit, and the parts."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def visit(self, key: Any) -> tuple[int, bool]:
        is_new = key not in self.numbers
        return self.numbers.setdefault(key, len(self.numbers)), is_new


class Live(Tree):
    """Of the variables themselves."""

    def of(self, one: Any) -> Any:
        kind = type(one)
        if kind in (int, float, str, bool, type(None)):
            return kind.__name__, repr(one)
        if kind in (tuple, Point):
            return kind.__name__, *map(self.of, one)
        if kind is FrozenState:
            return kind.__name__, one.step, one.tokens
        number, is_new = self.visit(id(one))
        if not is_new:
            return number
        if kind is torch.Tensor:
            return "Tensor", number, self.visit(one.untyped_storage().data_ptr())[0], one.tolist()
        if kind is type(user_values.make_counter()):
            return "function", number, one.__closure__[0].cell_contents
        if kind in (dict, OrderedDict, NamedCounts):
            items = [(key, self.of(item)) for key, item in one.items()]
            return kind.__name__, number, *items, *((vars(one)["updates"],) if kind is NamedCounts else ())
        if kind in (Bare, Meter):
            return "object", number, *((name, self.of(item)) for name, item in sorted(vars(one).items()))
        if kind is functools.partial:
            return "partial", number, *map(self.of, one.args)
        if kind is set:
            return "set", number, *sorted(one)
        return kind.__name__, number, *map(self.of, one), *((one.maxlen,) if kind is deque else ())


class Recorded(Tree):
    """Of a record."""

    def __init__(self, scopes: list[dict[str, Any]], blobs: list[memoryview]) -> None:
        super().__init__()
        self.blobs = blobs
        self.defined: dict[int, Any] = {}
        for scope in scopes:
            self._define(scope)

    def _define(self, one: Any) -> None:
        if isinstance(one, nodes.NumberedNode):
            assert one.number not in self.defined, f"{one} and {self.defined[one.number]} have one number"
            self.defined[one.number] = one
        parts: Any = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        if isinstance(one, nodes.AnyNode):
            parts = [getattr(one, name) for name in one.__struct_fields__]
        for part in parts:
            self._define(part)

    def of(self, one: Any) -> Any:
        if isinstance(one, nodes.ReferenceNode):
            return self.of(self.defined[one.number])
        if not isinstance(one, nodes.AnyNode):
            return type(one).__name__, repr(one)
        if isinstance(one, nodes.TupleNode):
            return "Point" if one.kind else "tuple", *map(self.of, one.items)
        if isinstance(one, nodes.ValueObjectNode):
            return "FrozenState", one.attributes["step"], one.attributes["tokens"]
        assert isinstance(one, nodes.NumberedNode), one
        number, is_new = self.visit(one.number)
        return self._new(one, number) if is_new else number

    def _new(self, one: Any, number: int) -> Any:
        match one:
            case nodes.TensorNode():
                return "Tensor", number, *self._tensor(one)
            case nodes.FunctionNode():
                return "function", number, one.cells["count"]
            case nodes.DictNode():
                kind = (one.kind or "dict").rpartition(":")[2]
                items = [(key, self.of(item)) for key, item in zip(one.keys, one.values, strict=True)]
                return kind, number, *items, *([one.attributes["updates"]] if kind == "NamedCounts" else [])
            case nodes.ObjectNode():
                return "object", number, *((name, self.of(item)) for name, item in sorted(one.attributes.items()))
            case nodes.PartialNode(arguments=nodes.TupleNode() as arguments):
                return "partial", number, *map(self.of, arguments.items)
            case nodes.SetNode():
                return "set", number, *sorted(one.items)
            case nodes.DequeNode():
                return "deque", number, *map(self.of, one.items), one.max_length
            case nodes.ListNode():
                return "list", number, *map(self.of, one.items)
        raise AssertionError(one)

    def _tensor(self, one: nodes.TensorNode) -> tuple[int, list[float]]:
        owner = self.defined[one.contents] if isinstance(one.contents, int) else one
        raw = owner.contents if isinstance(owner.contents, bytes) else self.blobs[owner.contents[0]]
        whole = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        stride, offset = ([1], 0) if one.layout is None else one.layout[:2]
        return self.visit(("storage", owner.number))[0], whole.as_strided(one.shape, stride, offset).tolist()


def trees(tree: Tree, scopes: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: tree.of(scope[name]) for name in sorted(scope)} for scope in scopes]  # type: ignore[attr-defined]


def record(scopes: list[Scope]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """At a boundary: functions' variables come in a dictionary that is new, a module's in its own."""
    values.begin_boundary()
    snapshot = Snapshot(NOTHING)
    *functions, module = scopes
    found = [snapshot.variables(dict(scope), ("function", at)) for at, scope in enumerate(functions)]
    found.append(snapshot.variables(module, "module", is_lasting=True))
    packed = [values.pack(scope) for scope in found]
    blobs = as_the_recorder_writes_them(snapshot.blobs)
    return [with_fixed(values.unpack_named(one)) for one in packed], blobs


def compare_at_each_boundary(seed: int) -> None:
    values.forget()
    script = Script(seed)
    for boundary in range(BOUNDARIES):
        if script.random.random() >= QUIET:
            for _ in range(script.random.randrange(1, 4)):
                script.change()
        recorded, blobs = record(script.scopes)
        live = trees(Live(), script.scopes)  # type: ignore[arg-type]
        assert trees(Recorded(recorded, blobs), recorded) == live, f"seed {seed}, boundary {boundary}"  # type: ignore[arg-type]


def compare_all(seeds: range) -> None:
    for seed in seeds:
        compare_at_each_boundary(seed)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_record_is_what_the_variables_are_at_each_boundary(first: int) -> None:
    compare_all(range(first, first + 10))


def test_what_is_kept_too_long_is_noticed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.Kept, "holds_alone", lambda self: True)

    with pytest.raises(AssertionError):
        compare_all(range(10))
