"""What has not changed is not walked over again, and each change is in the next record."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.calls import calls_of
from tests.capture import user_values
from tests.capture.user_values import Bare, LazyList, LazySet, LazyTable, Link, Meter, Stage, count_up
from tests.capture.values.carrying import Scope, are_alike, record
from ttprun.capture import values
from ttprun.capture.values import Restore, changes, kept, snapshot

NOTHING: dict[int, int] = {}
BOUNDARIES = 6  # from the third on nothing is looked at in detail


@dataclass(frozen=True)
class Frozen:
    items: list[int]
    name: str


class Pair(NamedTuple):
    one: int
    rest: list[int]


def _child(**attributes: Any) -> Meter:
    made = Meter.__new__(Meter)
    vars(made).update(attributes)
    return made


def _config() -> Any:
    """A tree of plain data, as frameworks have it."""
    return SimpleNamespace(
        sizes={"small": (2, 3), "large": [4, 5]},
        names=["a", "b", [1, 2, {"deep": [3]}]],
        order=OrderedDict(a=1, b=2, c=[3]),
        window=deque([1, 2, 3], maxlen=5),
        seen={"x", 1},
        frozen=Frozen([1], "z"),
        point=Pair(1, [2]),
        stage=Stage.MAIN,
        child=_child(rate=0.5, child=_child(count=0, items=[])),
        call=user_values.wait_for,
        kind=Bare,
        rows=[{"id": number} for number in range(5)],
        letters=list("abcdefghijklmnopqrstuvwxyz"),
        table=[{"id": number, "tokens": [number]} for number in range(20)],
        registry=type("Registry", (), {"__module__": user_values.__name__, "table": {"a": [1]}, "look": _config}),
        states=[Frozen([number], "z") for number in range(14)],
        part=functools.partial(dict, [("a", 1)], b=[2]),
        counts=defaultdict(int, a=1),
        lazy=LazyTable(a=1, b=[2], c=3),
        lazy_list=LazyList([1, [2]]),
        lazy_set=LazySet({"x", "y"}),
    )


def _replace_dictionary(config: Any) -> None:
    config.child.child.__dict__ = {"count": 0, "items": [], "more": 1}


def _become(config: Any) -> None:
    config.child.child.__class__ = Bare


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda config: setattr(config, "fresh", 1),
    "an attribute replaced": lambda config: setattr(config, "point", Pair(1, [3])),
    "an attribute taken away": lambda config: delattr(config, "seen"),
    "an item of a list in a dictionary": lambda config: config.sizes["large"].__setitem__(1, 6),
    "an equal item of another type": lambda config: config.sizes["large"].__setitem__(1, 5.0),
    "a list appended to": lambda config: config.names[2][2]["deep"].append(4),
    "a long list": lambda config: config.letters.__setitem__(20, "z"),
    "a dictionary": lambda config: config.names[2][2].update(deeper=1),
    "a key taken away and put back": lambda config: config.sizes.update(small=config.sizes.pop("small")),
    "items in another order": lambda config: config.order.move_to_end("a"),
    "an item of an ordered dictionary": lambda config: config.order["c"].append(4),
    "an attribute of an ordered dictionary": lambda config: setattr(config.order, "note", 1),
    "a deque": lambda config: config.window.append(4),
    "a deque rotated": lambda config: config.window.rotate(),
    "a set": lambda config: config.seen.add("y"),
    "a set with another item": lambda config: (config.seen.remove("x"), config.seen.add("y")),
    "a list in a frozen object": lambda config: config.frozen.items.append(2),
    "a field of a frozen object": lambda config: object.__setattr__(config.frozen, "name", "y"),
    "a list in a named tuple": lambda config: config.point[1].append(3),
    "an attribute of a child": lambda config: setattr(config.child, "rate", 0.25),
    "an attribute of its child": lambda config: setattr(config.child.child, "count", 1),
    "a list of its child": lambda config: config.child.child.items.append(1),
    "another dictionary of attributes": _replace_dictionary,
    "another class": _become,
    "a tensor in place of a number": lambda config: setattr(config.child, "rate", torch.ones(2)),
    "a generator in place of a number": lambda config: setattr(config.child, "rate", count_up(1)),
    "a row": lambda config: config.rows[3].update(id=7),
    "a row that is another one": lambda config: config.rows.__setitem__(3, {"id": 3.0}),
    "an attribute of a class": lambda config: setattr(config.kind, "calls", 1),
    "a row of a long list": lambda config: config.table[13]["tokens"].append(0),
    "a row added to a long list": lambda config: config.table.append({}),
    "a field of one of many frozen objects": lambda config: object.__setattr__(config.states[7], "name", "y"),
    "a list in one of many frozen objects": lambda config: config.states[7].items.append(0),
    "a table of a class": lambda config: config.registry.table["a"].append(2),
    "a class's table that is another one": lambda config: setattr(config.registry, "table", {"a": [1, 2]}),
    "a table in place of a method": lambda config: setattr(config.registry, "look", [1]),
    "an argument of a partial": lambda config: config.part.keywords["b"].append(3),
    "a count": lambda config: config.counts.update(a=2),
    "a new count": lambda config: config.counts["b"],
    "what makes counts": lambda config: setattr(config.counts, "default_factory", float),
    "an item of a dictionary with methods of its own": lambda config: config.lazy.update(a=2),
    "a list in it": lambda config: config.lazy["b"].append(3),
    "its items in another order": lambda config: config.lazy.move_to_end("a"),
    "its attribute": lambda config: setattr(config.lazy, "more", [1]),
    "an item of a list with methods of its own": lambda config: config.lazy_list.__setitem__(0, 3),
    "a list in that": lambda config: config.lazy_list[1].append(3),
    "an attribute of that": lambda config: setattr(config.lazy_list, "more", 1),
    "an item of a set with methods of its own": lambda config: config.lazy_set.add("z"),
    "an attribute of a function": lambda config: setattr(config.call, "calls", 1),
}  # fmt: skip

PLACES: dict[str, Callable[[Any], tuple[Scope, bool]]] = {
    "a module": lambda config: ({"config": config, "other": 1}, True),
    "a function": lambda config: ({"config": config, "other": 1}, False),
    "an object with a tensor": lambda config: ({"state": SimpleNamespace(config=config, weight=torch.ones(1))}, False),
    "a list with a tensor": lambda config: ({"state": [config, torch.ones(1)]}, False),
    "a class": lambda config: ({"state": _made_class(config)}, False),
    "a module's attribute": lambda config: ({"model": _model(config)}, True),
}


def _made_class(config: Any) -> type:
    return type("Made", (), {"__module__": user_values.__name__, "config": config, "weight": torch.ones(1)})


def _model(config: Any) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model.config = config
    return model


@pytest.fixture(autouse=True)
def _begin_afresh() -> Iterator[None]:
    yield
    vars(user_values.wait_for).clear()
    if "calls" in vars(Bare):
        del Bare.calls  # type: ignore[attr-defined]
    values.forget()


def at_boundary(scope: Scope, is_lasting: bool) -> Any:
    """A record of the next boundary."""
    values.begin_boundary()
    return record(scope if is_lasting else dict(scope), key="kept", is_lasting=is_lasting)


def afresh(scope: Scope) -> Any:
    """The same by a walk that remembers nothing."""
    values.forget()
    return record(scope)


@pytest.mark.parametrize(
    ("place", "has_versions"), [*((place, True) for place in PLACES), ("an object with a tensor", False)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_deep_in_what_was_kept_is_in_the_next_record(
    change: str, place: str, has_versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (changes, kept):
        monkeypatch.setattr(module, "ARE_COUNTED", has_versions and changes.ARE_COUNTED)
    config = _config()
    scope, is_lasting = PLACES[place](config)
    before = [at_boundary(scope, is_lasting) for _ in range(BOUNDARIES)][-1]

    CHANGES[change](config)
    behind = at_boundary(scope, is_lasting)
    again = at_boundary(scope, is_lasting)
    found = afresh(scope)

    assert not are_alike(before, found)
    assert are_alike(behind, found)
    assert are_alike(again, found)


def test_what_is_met_earlier_from_now_on_is_referred_to_where_it_was_kept() -> None:
    rows = [{"id": 1}, {"id": 2}]
    first: Scope = {"row": None, "weight": torch.ones(1)}
    second: Scope = {"rows": rows}

    def both() -> Any:
        values.begin_boundary()
        walk = snapshot.Snapshot(NOTHING)
        return [walk.variables(dict(first), "first"), walk.variables(second, "second", True)]

    for _ in range(BOUNDARIES):
        both()
    first["row"] = rows[1]
    for _ in range(BOUNDARIES):
        one, other = (values.unpack_named(values.pack(nodes)) for nodes in both())
        here: tuple[Scope, Scope] = {}, {}
        restore = Restore([], is_comparing=False)
        restore.module(here[0], one, "")
        restore.module(here[1], other, "")
        assert here[1]["rows"][1] is here[0]["row"]
        assert here[1]["rows"] == rows


@pytest.mark.parametrize("place", PLACES)
def test_what_has_not_changed_costs_no_walk(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third boundary on: the first finds that all can be kept, the second keeps it."""
    scope, is_lasting = PLACES[place](_config())
    walks = [snapshot.Snapshot(NOTHING) for _ in range(BOUNDARIES)]
    made: list[type] = []
    node = snapshot.Snapshot.node
    monkeypatch.setattr(
        snapshot.Snapshot, "node", lambda self, value, depth: (made.append(type(value)), node(self, value, depth))[1]
    )

    counts = []
    for walk in walks:
        values.begin_boundary()
        made.clear()
        walk.variables(scope if is_lasting else dict(scope), "kept", is_lasting)
        counts.append(len(made))

    assert counts[0] > 30
    assert counts[-1] <= 3  # what holds the tensor, and the tensor


def test_what_refers_to_a_thing_that_is_met_later_costs_no_walk_either(monkeypatch: pytest.MonkeyPatch) -> None:
    open_one = SimpleNamespace(weight=torch.ones(1))
    scope: Scope = {"refers": {"one": open_one, "rows": [{"id": 1}, {"id": 2}]}, "last": [open_one]}
    owner = SimpleNamespace(first=open_one)
    made: list[Any] = []
    node = snapshot.Snapshot.node
    monkeypatch.setattr(
        snapshot.Snapshot, "node", lambda self, value, depth: (made.append(value), node(self, value, depth))[1]
    )
    for number in range(12):
        now = {"count": number, "owner": owner} | scope
        made.clear()
        found = at_boundary(now, False)
        is_walked = any(one is scope["refers"] for one in made)
        assert are_alike(found, record(now))

    assert not is_walked


def test_what_has_changed_in_the_first_boundaries_alone_costs_no_walk_later(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    scope: Scope = {"config": config}
    made: list[Any] = []
    node = snapshot.Snapshot.node
    monkeypatch.setattr(
        snapshot.Snapshot, "node", lambda self, value, depth: (made.append(value), node(self, value, depth))[1]
    )

    for number in range(60):
        if number < 10:
            config.sizes["large"].append(number)
        made.clear()
        at_boundary(scope, True)
        if number == 12:
            assert any(one is config.sizes for one in made)

    assert not made


def test_a_tree_of_plain_data_costs_few_calls_whatever_its_size() -> None:
    configs = [_config() for _ in range(20)]
    scope: Scope = {"configs": configs}
    counts = []
    for _ in range(BOUNDARIES):
        values.begin_boundary()
        walk = snapshot.Snapshot(NOTHING)
        counts.append(calls_of(lambda walk=walk: walk.variables(scope, "kept", True)))  # type: ignore[misc]

    assert counts[0] > 3000
    assert counts[-1] < 250  # two for each container whose class may have methods of its own


def test_what_is_kept_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    pack = kept.pack
    monkeypatch.setattr(kept, "pack", lambda nodes: (packed.append(len(nodes)), pack(nodes))[1])
    scope: Scope = {"config": _config(), "step": 0}

    for number in range(20):
        scope["step"] = number
        at_boundary(scope, True)

    assert len(packed) <= 2


def test_what_the_script_has_dropped_is_let_go() -> None:
    scope: Scope = {"config": _config(), "state": SimpleNamespace(child=Link(1, None), weight=torch.ones(1))}
    for _ in range(BOUNDARIES):
        at_boundary(scope, True)
    gone = [weakref.ref(scope["config"].child), weakref.ref(scope["state"].child), weakref.ref(scope["state"].weight)]

    weight = gone[2]
    scope.clear()
    assert weight() is None
    values.begin_boundary()
    values.begin_boundary()

    assert [one() for one in gone] == [None, None, None]


def test_objects_that_share_their_attributes_are_two_objects() -> None:
    first, second = Bare(), Bare()
    second.__dict__ = first.__dict__
    first.weight = torch.ones(1)  # type: ignore[attr-defined]
    scope: Scope = {"first": first, "second": second}

    for _ in range(BOUNDARIES):
        found = at_boundary(scope, True)
        nodes = snapshot.with_fixed(found[0])
        assert nodes["first"].number != nodes["second"].number
    first.weight = torch.zeros(1)  # type: ignore[attr-defined]
    assert are_alike(at_boundary(scope, True), afresh(scope))
