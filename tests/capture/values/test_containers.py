"""Plain values and containers: what a replacement gets back of them."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.weak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capture.user_values import (
    Meter,
    NamedCounts,
    Point,
    Saver,
    Stage,
    State,
)
from tests.capture.values.carrying import (
    LONG,
    Scope,
    carry,
    is_refused,
    not_proved,
    plain,
    record,
)
from ttprun import text_hashes
from ttprun.capture import values
from ttprun.capture.records.nodes import RefusedNode
from ttprun.capture.values import CannotRestoreError, Restore
from ttprun.capture.values.changes import Clock


@pytest.mark.parametrize(
    "value",
    [0, -1, 1 << 62, (1 << 64) - 1, 1 << 64, -(1 << 80), 10**300, True, None, "", "ü\n", b"\x00\xff", -0.0, 1e-310,
     float("inf"), float("-inf"), complex(1, -2)],
    ids=repr,
)  # fmt: skip
def test_a_scalar_comes_back_exactly(value: Any) -> None:
    here: Scope = {"x": "something else"}

    carry({"x": value}, here)

    assert here["x"] == value
    assert type(here["x"]) is type(value)
    assert repr(here["x"]) == repr(value)


def test_not_a_number_comes_back() -> None:
    here: Scope = {"x": 0.0, "many": [0.0]}

    carry({"x": math.nan, "many": [1.0, math.nan]}, here)

    assert math.isnan(here["x"])
    assert here["many"][0] == 1.0
    assert math.isnan(here["many"][1])


@pytest.mark.parametrize("text", ["\ud800", "file-\udcff"], ids=["lone surrogate", "undecodable file name"])
def test_a_text_that_is_no_unicode_does_not_end_the_protection_of_the_rank(text: str) -> None:
    here: Scope = {"name": "x", "step": 0}

    carry({"name": text, "step": 4}, here)

    assert here["step"] == 4


CONTAINERS = [
    ([1, [2, "a", None]], [0]),
    ([], [1, 2, 3]),
    ({"a": 1, "b": {"c": [1.5]}}, {"a": 0, "old": 2}),
    ({1: "x", (2, 3): "y", None: "z", 2.5: "w", b"k": 1, True: 4}, {}),
    ({1, 2, 3}, {9}),
    ({(1, 2), "a", b"b", None}, set()),
    (collections.deque([4, 5], maxlen=2), collections.deque([1], maxlen=2)),
    (collections.Counter("abca"), collections.Counter("b")),
    (collections.defaultdict(list, {"a": [1, 2]}), collections.defaultdict(list, {"a": [1], "b": []})),
    (collections.OrderedDict(a=1, b=2), collections.OrderedDict(a=0)),
    (NamedCounts({"a": 1}), NamedCounts({"a": 0})),
]


@pytest.mark.parametrize(("lost", "live"), CONTAINERS, ids=lambda value: f"{type(value).__name__}-{len(value)}")
def test_a_container_keeps_its_identity_and_takes_the_items_of_the_lost_rank(lost: Any, live: Any) -> None:
    here = {"x": live}

    carry({"x": lost}, here)

    assert here["x"] is live
    assert live == lost or {k: v for k, v in live.items() if v} == lost
    assert type(live) is type(lost)
    assert getattr(live, "maxlen", None) == getattr(lost, "maxlen", None)
    assert getattr(live, "default_factory", None) == getattr(lost, "default_factory", None)


@pytest.mark.parametrize(
    ("lost", "live"),
    [
        ((1, 2.5, "c"), (1, 2.5, "b")),
        ((), (1,)),
        (Point(1.0, 2.0), Point(0.0, 0.0)),
        (Saver.Item(1.0, "a.pt"), ()),
        (frozenset({1, 2}), frozenset({3})),
        ((1, (2, [3])), (1, (2, [4]))),
    ],
)
def test_an_immutable_container_is_replaced_by_one_of_the_same_type(lost: Any, live: Any) -> None:
    here = {"x": live}

    carry({"x": lost}, here)

    assert here["x"] == lost
    assert type(here["x"]) is type(lost)


def test_a_shape_stays_a_shape() -> None:
    here = {"shape": torch.zeros(2, 7).shape}

    carry({"shape": torch.zeros(512, 784).shape}, here)

    assert here["shape"].numel() == 512 * 784


def test_the_result_of_max_keeps_its_fields() -> None:
    here = {"best": torch.max(torch.zeros(2, 2), dim=1)}

    carry({"best": torch.max(torch.eye(2), dim=1)}, here)

    assert here["best"].values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [Point(1.0, 2.0), collections.Counter("ab"), collections.defaultdict(list, a=[1]), NamedCounts({"a": 1}),
     collections.deque([1], maxlen=3)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_container_that_the_replacement_has_not_made_yet_is_of_the_same_type_or_refused(value: Any) -> None:
    here: Scope = {"x": None}

    refused = is_refused({"x": value}, here)

    assert refused or type(here["x"]) is type(value)


def test_a_dict_comes_back_in_the_order_of_the_lost_rank() -> None:
    here = {"cache": {"a": 1, "b": 2, "c": 3}}

    carry({"cache": {"c": 3, "a": 1, "b": 2}}, here)

    assert list(here["cache"]) == ["c", "a", "b"]


def test_what_the_lost_rank_has_taken_out_of_a_dict_is_not_in_the_replacement() -> None:
    here = {"pending": {"a": 1, "b": [2], "c": Meter()}}

    carry({"pending": {"a": 1}}, here)

    assert here["pending"] == {"a": 1}


@pytest.mark.parametrize(
    "key", [Stage.MAIN, np.int64(3), frozenset({1}), (Stage.MAIN, 1)], ids=["enum", "numpy", "frozenset", "tuple"]
)
def test_a_count_by_a_key_of_any_kind_is_not_silently_left_as_it_was(key: Any) -> None:
    here = {"counts": {key: 1}}

    refused = is_refused({"counts": {key: 5}}, here)

    assert refused or here["counts"][key] == 5


@pytest.mark.parametrize("count", [2, 40])
def test_a_dict_and_a_set_of_ids_have_those_of_the_replacements_objects(count: int) -> None:
    lost: Scope = {"meters": [Meter() for _ in range(count)]}
    lost |= {"places": {id(one): at for at, one in enumerate(lost["meters"])}, "all": set(map(id, lost["meters"]))}
    here: Scope = {"meters": [Meter() for _ in range(count)], "places": {}, "all": set()}

    mismatches = carry(lost, here)

    assert mismatches == []
    assert here["places"] == {id(one): at for at, one in enumerate(here["meters"])}
    assert here["all"] == set(map(id, here["meters"]))


def test_two_names_for_one_object_stay_two_names_for_one_object() -> None:
    shared = [1, 2]
    meter = Meter()
    other = [0]
    here = {"a": other, "b": other, "c": {"deep": [other]}, "first": meter, "second": (meter, 1)}

    lost_meter = Meter()
    carry({"a": shared, "b": shared, "c": {"deep": [shared]}, "first": lost_meter, "second": (lost_meter, 2)}, here)
    here["a"].append(3)

    assert here["b"] == [1, 2, 3]
    assert here["c"]["deep"][0] is here["a"]
    assert here["second"][0] is here["first"]


def test_one_list_under_two_names_here_becomes_two_if_the_lost_rank_had_two() -> None:
    both = [0]
    here = {"previous": both, "present": both}

    carry({"previous": [1, 2], "present": [3]}, here)

    assert here == {"previous": [1, 2], "present": [3]}


def test_one_object_under_two_names_here_becomes_two_or_is_refused() -> None:
    both = State(step=0)
    here = {"best": both, "present": both}

    refused = is_refused({"best": State(step=3), "present": State(step=9)}, here)

    assert refused or (here["best"].step, here["present"].step) == (3, 9)


def test_a_list_that_contains_itself_comes_back() -> None:
    lost: list[Any] = [1]
    lost.append(lost)
    here: Scope = {"x": [0]}

    carry({"x": lost}, here)

    assert here["x"][0] == 1
    assert here["x"][1] is here["x"]


def test_things_that_cannot_be_recorded_stay_where_they_are_in_a_list() -> None:
    callback = functools.partial(print)
    here = {"hooks": [callback, 1]}

    carry({"hooks": [functools.partial(print), 2]}, here)

    assert here["hooks"] == [callback, 2]


def test_a_set_of_things_that_cannot_be_recorded_does_not_hinder_the_recovery_if_both_hold_as_many() -> None:
    here = {"skipped": {print, len}, "step": 0}

    carry({"skipped": {print, len}, "step": 1}, here)

    assert here == {"skipped": {print, len}, "step": 1}


def test_a_long_list_of_another_length_is_a_mismatch_if_a_step_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "records", 2)

    assert carry({"losses": [0.0] * LONG}, {"losses": [0.0] * 5}) == ["losses is a long container of another length"]


def test_a_long_list_of_the_set_up_comes_back_with_its_length() -> None:
    here = {"losses": [0.0] * 5}

    assert carry({"losses": [0.0] * LONG}, here) == []
    assert here == {"losses": [0.0] * LONG}


@pytest.mark.parametrize("kind", [list, collections.deque, lambda items: dict(enumerate(items))])
def test_a_container_of_thousands_of_items_comes_back(kind: Callable[[Any], Any]) -> None:
    here = {"losses": kind([0.5])}

    carry({"losses": kind([1.0] * 30_000)}, here)

    assert here["losses"] == kind([1.0] * 30_000)


def test_a_list_that_grows_from_boundary_to_boundary_comes_back_each_time() -> None:
    losses: list[Any] = [float(i) for i in range(40)]
    here: Scope = {"losses": []}

    for item in (1.5, "text", None, (1, "pair"), 1 << 70, [0], 2.5):
        values.begin_boundary()
        losses.append(item)
        carry({"losses": losses}, here)
        assert here["losses"] == losses


def test_what_is_not_proved_beside_a_long_dict_is_named() -> None:
    scope = {"places": {number: 1000 * number for number in range(40)}, "kept": contextvars.ContextVar("kept")}

    named = not_proved(scope)

    assert [one.partition(" ")[0] for one in named] == ["kept"]


def test_an_item_that_is_set_in_the_middle_of_a_long_list_comes_back() -> None:
    table = [0.0] * 100
    here: Scope = {"table": [0.0] * 100}
    carry({"table": table}, here)

    values.begin_boundary()
    table[50] = -0.0
    table[51] = 0
    carry({"table": table}, here)

    assert repr(here["table"]) == repr(table)


@pytest.mark.parametrize("kind", [list, collections.deque, lambda items: dict(enumerate(items))])
def test_a_long_container_with_other_items_of_the_same_number_is_a_mismatch(kind: Callable[[Any], Any]) -> None:
    assert carry({"replay_buffer": kind([1.0] * LONG)}, {"replay_buffer": kind([2.0] * LONG)})


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("items", [range(30), [number * number for number in range(30)], [(1, 2), (0, 5)], []])
def test_a_set_of_numbers_gives_its_items_in_the_order_of_the_lost_rank(kind: Any, items: Any) -> None:
    lost, here = kind(items), {"pool": kind(range(1000))}

    carry({"pool": lost}, here)

    assert list(here["pool"]) == list(lost)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_whose_iteration_order_a_new_one_does_not_have_is_refused(kind: Any) -> None:
    two_for_one_slot = kind([7, 15, 3])

    with pytest.raises(CannotRestoreError, match=f"pool is a {kind.__name__} with another iteration order than"):
        carry({"pool": two_for_one_slot}, {"pool": kind()})


@pytest.fixture
def seed_of_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if PYTHONHASHSEED were the user's own."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    text_hashes.note_who_seeded()
    yield
    monkeypatch.undo()
    text_hashes.note_who_seeded()


@pytest.mark.usefixtures("seed_of_user")
def test_with_a_seed_of_the_users_a_set_of_texts_gives_them_in_the_order_of_the_lost_rank_or_is_refused() -> None:
    orders = set()
    for count in range(2, 40):
        lost = {f"word {number}" for number in range(2 * count)}
        for item in list(lost)[::2]:
            lost.discard(item)
        here: set[str] = set()

        if is_refused({"names": lost}, {"names": here}):
            orders.add("refused")
        else:
            assert list(here) == list(lost)
            orders.add("reached")

    assert orders == {"refused", "reached"}


def test_the_order_of_a_set_of_texts_is_another_in_each_run_and_hinders_nothing() -> None:
    here: set[Any] = {"z"}

    carry({"names": {"a", "b", None, ("c", 1)}}, {"names": here})

    assert here == {"a", "b", None, ("c", 1)}


def test_a_long_list_that_has_grown_is_known_from_what_it_was() -> None:
    names = [str(number) for number in range(LONG)]
    carry({"names": names}, {"names": names[:]})
    values.begin_boundary()
    names.append("last")

    assert carry({"names": names}, {"names": names[:]}) == []
    assert carry({"names": names}, {"names": [*names[:-1], "other"]}) == ["names is a long container with other items"]


scopes = st.dictionaries(st.sampled_from("abcdef"), plain, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(lost=scopes, here=scopes)
def test_plain_values_of_any_form_come_back(lost: Scope, here: Scope) -> None:
    carry(lost, here)

    assert {name: here[name] for name in lost} == lost
    assert repr({name: here[name] for name in sorted(lost)}) == repr({name: lost[name] for name in sorted(lost)})


def collected() -> set[Any]:
    """What a decorator puts functions into, and returns something else."""
    found: set[Any] = set()

    def note(function: Any) -> Any:
        function.uses = [0]
        found.add(function)
        return functools.partial(function)

    @note
    def activation() -> None: ...

    @note
    class Layer: ...

    assert not isinstance(activation, type(note))
    assert Layer
    return found


def test_a_set_of_functions_that_a_decorator_has_filled_is_no_state_and_hinders_nothing() -> None:
    here = {"functions": (mine := collected())}

    assert carry({"functions": collected()}, here) == []

    assert here["functions"] is mine


class Owner(Meter):
    """What only its constructor makes."""

    def __del__(self) -> None:
        self.values.clear()


@pytest.mark.parametrize("live", [None, [], ["of this process"]])
def test_a_list_of_which_not_all_items_are_here_stays_as_the_replay_has_made_it(live: Any) -> None:
    """E.g. the samples that a dataset keeps once it has read them: with gaps, an index would name another one."""
    here, before = {"cache": live}, copy.copy(live)
    recorded, blobs = record({"cache": [1, Owner(), None]})
    restore = Restore(blobs, is_comparing=True, is_strict=False)

    with values.room_to_walk():
        restore.module(here, recorded, "")

    assert here["cache"] == before
    assert restore.doubts


def test_such_a_set_hinders_nothing_where_two_variables_hold_it() -> None:
    mine, theirs = collected(), collected()

    assert carry({"functions": theirs, "of": {"package": theirs}}, {"functions": mine, "of": {"package": mine}}) == []


def test_what_cannot_be_recorded_is_named_in_each_variable_that_holds_it() -> None:
    """In the first of them it may not matter: one that the script sets again before it reads it."""
    changing = {Point(1, 2), Point(3, 4)}

    recorded, _ = record({"dead": changing, "alive": [changing]})

    nodes = [recorded["dead"], *recorded["alive"].items]
    assert [type(node) for node in nodes] == [RefusedNode, RefusedNode]
