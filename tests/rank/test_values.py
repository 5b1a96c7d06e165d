"""What a snapshot holds of a script's variables, and what a replacement gets back."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import hashlib
import io
import itertools
import logging
import math
import operator
import pathlib
import queue
import random
import re
import struct
import sys
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.rank import user_values
from tests.rank.user_values import (
    CountingSgd,
    FrozenState,
    Meter,
    NamedCounts,
    Net,
    Point,
    SlottedState,
    Stage,
    State,
    Trainer,
    count_up,
    doubled,
    train,
)
from ttprun.rank import frames, values
from ttprun.rank.values import CannotRestoreError, Restore, Snapshot, UnrecordedTensorError

frames.add_user_directory(user_values.__file__)
frames._user_directories.append(user_values.__file__)  # the file alone: the tests beside it are not the user's

Scope = dict[str, Any]
LONG = 100_010  # more items than are recorded one by one


def record(scope: Scope, stepped: set[int] | None = None) -> tuple[Any, list[memoryview]]:
    """A scope as it comes out of the recorder."""
    snapshot = Snapshot(dict.fromkeys(stepped or (), 0))
    packed = values.pack(snapshot.variables(scope))
    blobs = as_the_recorder_writes_them(snapshot.blobs)
    return values.unpack(packed), blobs


def as_the_recorder_writes_them(blobs: list[torch.Tensor]) -> list[memoryview]:
    """What lies in memory where a blob says that it begins."""
    return [memoryview(ctypes.string_at(blob.data_ptr(), blob.nbytes)) for blob in blobs]


def carry(lost: Scope, here: Scope, stepped: set[int] | None = None) -> list[str]:
    """Put the lost rank's variables into the replacement's; returns the mismatches."""
    recorded, blobs = record(lost, stepped)
    restore = Restore(blobs, is_comparing=True)
    restore.module(here, recorded, "")
    return restore.mismatches


def is_refused(lost: Scope, here: Scope) -> bool:
    """Whether the recovery would end here with a reason."""
    try:
        return bool(carry(lost, here))
    except CannotRestoreError:
        return True


# Frames.


def test_a_function_that_runs_goes_on_with_the_variables_of_the_lost_rank() -> None:
    recorded: list[Any] = []

    def act(stack: list[types.FrameType]) -> None:
        if not recorded:
            snapshot = Snapshot({})
            recorded.extend(values.unpack(values.pack([snapshot.variables(frame.f_locals) for frame in stack])))
            return
        restore = Restore([], is_comparing=True)
        for frame, variables in zip(stack, recorded, strict=True):
            restore.frame(frame, variables, "")

    lost = train(act, start=7)
    replacement = train(act, start=1)

    assert replacement == lost


def test_a_variable_that_the_replacement_has_not_set_yet_is_set() -> None:
    here: Scope = {}

    carry({"step": 3, "name": "x", "pair": (1, 2), "table": {"a": [1]}}, here)

    assert here == {"step": 3, "name": "x", "pair": (1, 2), "table": {"a": [1]}}


def test_globals_of_a_module_are_written_in_place() -> None:
    here = {"__name__": "config", "steps": 0, "schedule": [1, 2], "torch": torch, "train": train}
    schedule = here["schedule"]

    carry({"__name__": "other", "steps": 5, "schedule": [4, 5, 6], "torch": torch, "train": train}, here)

    assert here["steps"] == 5
    assert here["schedule"] is schedule
    assert schedule == [4, 5, 6]
    assert (here["__name__"], here["torch"], here["train"]) == ("config", torch, train)


def test_what_stays_the_same_is_told_at_each_boundary_and_what_changes_then_too() -> None:
    """Functions, modules and the like are packed once for each scope; a change of one of them is not missed."""
    lost: Scope = {
        "torch": torch,
        "train": train,
        "path": pathlib.Path("a"),
        "meter": Meter(),
        "device": torch.device("cpu"),
        "limit": 700,
        "name": "a",
    }
    here: Scope = dict(lost, meter=Meter())
    stepped: dict[int, int] = {}
    for step in range(8):
        values.begin_boundary()
        lost["meter"].update(step)
        if step == 2:
            lost["path"] = pathlib.Path("b")
        if step == 3:
            lost["train"] = count_up
        if step == 4:
            del lost["device"]
            lost["limit"] = 701
        if step == 5:
            lost["name"] = lost.pop("name") + "b"
            lost["new"] = 1
        recorded = values.unpack(values.pack(Snapshot(stepped).variables(lost, "a scope of this test")))
        Restore([], is_comparing=True).module(here, recorded, "")

        assert here["meter"].count == step + 1
        assert {name: here[name] for name in here if name != "meter"} == {
            name: lost[name] for name in lost if name != "meter"
        }


def test_an_attribute_that_a_function_is_given_after_some_steps_is_recorded() -> None:
    stepped: dict[int, int] = {}
    told = []
    try:
        for step in range(5):
            if step > 2:
                count_up.calls = step  # type: ignore[attr-defined]
            found = Snapshot(stepped).variables({"count_up": count_up, "device": torch.device("cpu")}, "another scope")
            told.append(found["count_up"][4] if "count_up" in found else None)
    finally:
        del count_up.calls  # type: ignore[attr-defined]

    assert told == [None, None, None, {"calls": 3}, {"calls": 4}]


def test_a_variable_of_a_function_that_the_lost_rank_has_deleted_is_unset() -> None:
    def work() -> bool:
        step, scratch = 1, 2
        frame = sys._getframe()
        Restore([], is_comparing=True).frame(frame, {"step": 5, "frame": ["=", "builtins:frame", ""]}, "")
        try:
            return (step, scratch) == (5, 2)
        except UnboundLocalError:
            return step == 5

    if sys.version_info < (3, 13):
        assert work()
    else:
        with pytest.raises(CannotRestoreError, match="scratch is set here"):
            work()


# Plain values and containers.


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


def test_a_long_list_of_another_length_is_a_mismatch() -> None:
    assert carry({"losses": [0.0] * LONG}, {"losses": [0.0] * 5}) == ["losses is a long container of another length"]


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


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet=st.characters(codec="utf-8"))
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(alphabet="abc", max_size=2) | st.integers(0, 5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
scopes = st.dictionaries(st.sampled_from("abcdef"), plain, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lost=scopes, here=scopes)
def test_plain_values_of_any_form_come_back(lost: Scope, here: Scope) -> None:
    carry(lost, here)

    assert {name: here[name] for name in lost} == lost
    assert repr({name: here[name] for name in sorted(lost)}) == repr({name: lost[name] for name in sorted(lost)})


# Objects.


def test_attributes_several_levels_deep_come_back_into_the_same_objects() -> None:
    lost, live = Trainer(), Trainer()
    lost.epoch = 4
    lost.state.history += [0.5, 0.25]
    lost.meters["loss"].update(3.0)
    meter = live.meters["loss"]

    carry({"trainer": lost}, {"trainer": live})

    assert (live.epoch, live.state) == (4, State(history=[0.5, 0.25]))
    assert live.meters["loss"] is meter
    assert (meter.total, meter.count, meter.values) == (3.0, 1, [3.0])


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_a_namespace_comes_back(kind: Any) -> None:
    here = {"args": kind(lr=0.1, resume=None)}

    carry({"args": kind(lr=0.05, resume="a.pt", seen=3)}, here)

    assert here["args"] == kind(lr=0.05, resume="a.pt", seen=3)


def test_an_object_of_another_class_is_refused_with_its_name() -> None:
    with pytest.raises(CannotRestoreError, match="best is a State in the lost rank and Meter in the replacement"):
        carry({"best": State()}, {"best": Meter()})


def test_an_object_that_the_replacement_has_not_made_is_refused() -> None:
    with pytest.raises(CannotRestoreError, match="meter is a Meter"):
        carry({"meter": Meter()}, {"meter": None})


@pytest.mark.parametrize(
    ("lost", "live"),
    [(SlottedState(3, 0.5), SlottedState()), (FrozenState(3, 99), FrozenState())],
    ids=["slots", "frozen"],
)
def test_a_dataclass_of_any_kind_comes_back_or_is_refused(lost: Any, live: Any) -> None:
    here = {"state": live}

    refused = is_refused({"state": lost}, here)

    assert refused or here["state"] == lost


def test_a_frozen_object_that_is_shared_does_not_change_under_its_other_name() -> None:
    first = FrozenState(0, 0)
    here = {"start": first, "present": first}

    refused = is_refused({"start": FrozenState(0, 0), "present": FrozenState(5, 50)}, here)

    assert refused or here == {"start": FrozenState(0, 0), "present": FrozenState(5, 50)}


def test_counters_on_a_class_come_back() -> None:
    class_of_user = user_values.Meter
    recorded, _ = record({"Meter": class_of_user})
    recorded["Meter"][3]["total_made"] = 41

    Restore([], is_comparing=True).module({"Meter": class_of_user}, recorded, "")
    found, class_of_user.total_made = class_of_user.total_made, 0

    assert found == 41


def test_attributes_of_a_users_container_come_back() -> None:
    lost, live = NamedCounts(), NamedCounts()
    lost.updates = 5

    refused = is_refused({"counts": lost}, {"counts": live})

    assert refused or live.updates == 5


OTHER_KINDS = {
    "enum": (Stage.MAIN, Stage.WARM_UP),
    "path": (pathlib.Path("best-12.pt"), None),
    "another path": (pathlib.Path("b"), pathlib.Path("a")),
    "datetime": (datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 1)),
    "timedelta": (datetime.timedelta(seconds=9), datetime.timedelta(0)),
    "decimal": (decimal.Decimal("1.5"), decimal.Decimal("0.5")),
    "fraction": (fractions.Fraction(1, 3), fractions.Fraction(0)),
    "range": (range(5), range(3)),
    "slice": (slice(0, 9), slice(0, 3)),
    "bytearray": (bytearray(b"new"), bytearray(b"old")),
    "dtype": (torch.bfloat16, torch.float32),
    "device": (torch.device("meta"), torch.device("cpu")),
    "user dict": (collections.UserDict(a=1), collections.UserDict(a=0)),
    "function": (math.cos, math.sin),
    "class": (State, Meter),
    "object array": (np.array([1, "a"], dtype=object), np.array([0, "b"], dtype=object)),
    "sparse tensor": (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_variable_of_another_kind_that_has_changed_is_carried_or_refused_but_never_stale(kind: str) -> None:
    lost, live = OTHER_KINDS[kind]
    here = {"x": live}

    refused = is_refused({"x": lost}, here)

    assert refused or repr(here["x"]) == repr(lost)


def test_a_value_nested_deeper_than_is_recorded_is_not_silently_stale() -> None:
    def nest(value: int) -> Any:
        return functools.reduce(lambda inner, _: {"in": inner}, range(12), value)

    here = {"config": nest(1)}

    refused = is_refused({"config": nest(2)}, here)

    assert refused or here["config"] == nest(2)


# Iterators and generators.


def test_a_suspended_generator_of_the_user_goes_on_where_the_lost_ranks_stood() -> None:
    lost, live = count_up(10), count_up(0)
    assert [next(lost) for _ in range(5)] == [11, 12, 13, 14, 15]
    next(live)

    carry({"numbers": lost}, {"numbers": live})

    assert next(live) == 16


def test_a_generator_that_stands_at_another_line_is_refused() -> None:
    lost, live = count_up(10), count_up(0)
    next(lost)

    with pytest.raises(CannotRestoreError, match="numbers is a generator that stands elsewhere"):
        carry({"numbers": lost}, {"numbers": live})


ITERATORS: dict[str, Callable[[], Any]] = {
    "list iterator": lambda: iter([1, 2, 3, 4, 5]),
    "itertools.count": lambda: itertools.count(1),
    "itertools.cycle": lambda: itertools.cycle([1, 2, 3]),
    "zip": lambda: zip("abcde", range(5), strict=True),
    "map": lambda: map(abs, [1, 2, 3, 4, 5]),
    "enumerate": lambda: enumerate("abcde"),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "generator expression of the user's": lambda: doubled([1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_in_a_variable_goes_on_where_the_lost_ranks_stood_or_is_refused(kind: str) -> None:
    lost, live = ITERATORS[kind](), ITERATORS[kind]()
    for _ in range(3):
        next(lost)
    next(live)
    here = {"stream": live}

    refused = is_refused({"stream": lost}, here)

    assert refused or next(here["stream"]) == next(lost)


# Tensors and arrays.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5), torch.arange(6).reshape(2, 3), torch.zeros(0, 4), torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(),
        torch.arange(12.0).reshape(3, 4).t(), torch.tensor([1.0]).half(), torch.tensor([float("nan")]),
    ],
    ids=["0-d", "int", "empty", "bool", "bfloat16", "complex", "conj", "transposed", "half", "nan"],
)  # fmt: skip
def test_a_small_tensor_comes_back(tensor: torch.Tensor) -> None:
    here: Scope = {"x": torch.full_like(tensor, 0), "new": None}

    carry({"x": tensor, "new": tensor.clone()}, here)

    for found in here.values():
        assert found.dtype == tensor.dtype
        assert torch.equal(found.nan_to_num(7.0) if tensor.is_floating_point() else found, tensor.nan_to_num(7.0)
                           if tensor.is_floating_point() else tensor)  # fmt: skip


BATCHES = {
    "plain": lambda: torch.randn(30, 50),
    "transposed": lambda: torch.randn(30, 50).t(),
    "all of its storage but the first": lambda: torch.randn(31, 50)[1:],
    "a part of a large one": lambda: torch.randn(1000, 50)[3:33],
    "columns of a large one": lambda: torch.randn(1000, 50)[:60, :25],
    "conj": lambda: torch.randn(30, 50, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(30, 50, dtype=torch.complex64).conj().imag,
    "bytes": lambda: torch.randint(256, (5000,), dtype=torch.uint8),
    "learnt": lambda: torch.randn(30, 50, requires_grad=True),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_some_kilobytes_comes_back_as_it_is_though_no_version_counter_tells_that_it_changed(
    kind: str,
) -> None:
    lost, here, new = BATCHES[kind](), {"x": BATCHES[kind]()}, {"x": None}
    record({"x": lost})
    lost.data[-1] = 77

    carry({"x": lost}, here)
    carry({"x": lost}, new)

    assert torch.equal(here["x"], lost)
    assert torch.equal(new["x"], lost)


def test_names_for_parts_of_one_batch_share_its_memory_in_the_replacement() -> None:
    lost, live = torch.randn(40, 50), torch.zeros(40, 50)
    here = {"batch": live, "half": live[:20], "again": live}

    carry({"batch": lost, "half": lost[:20], "again": lost}, here)
    here["batch"].fill_(8.0)

    assert here["half"].eq(8.0).all()
    assert here["again"] is here["batch"]


def test_what_is_only_compared_holds_the_contents_of_a_batch_itself() -> None:
    apart = Snapshot({}, is_apart=True)

    first, second = (apart.node(torch.full((3000,), fill), 0) for fill in (0.0, 1.0))

    assert first[5] != second[5]
    assert not apart.blobs


def test_a_loss_comes_back_as_a_plain_tensor() -> None:
    weight = torch.ones(1, requires_grad=True)
    here = {"loss": (weight * 2).sum()}

    carry({"loss": (weight * 5).sum()}, here)

    assert here["loss"].item() == 5.0
    assert not here["loss"].requires_grad


def test_a_leaf_that_is_learnt_stays_one() -> None:
    here = {"temperature": torch.zeros(1, requires_grad=True)}

    carry({"temperature": torch.ones(1, requires_grad=True)}, here)

    assert here["temperature"].requires_grad
    assert here["temperature"].item() == 1.0


def test_two_names_for_one_tensor_stay_two_names_for_one_tensor() -> None:
    lost, live = torch.ones(3), torch.zeros(3)
    here = {"running": live, "meter": {"running": live}}

    carry({"running": lost, "meter": {"running": lost}}, here)

    assert here["meter"]["running"] is here["running"]


def test_a_view_of_a_small_tensor_stays_a_view_or_is_refused() -> None:
    lost, live = torch.ones(4), torch.zeros(4)
    here = {"stats": live, "first": live[:1]}

    refused = is_refused({"stats": lost, "first": lost[:1]}, here)
    if not refused:
        here["stats"].fill_(8)

    assert refused or here["first"].item() == 8.0


def test_a_tensor_that_something_else_holds_too_is_changed_for_both() -> None:
    """A closure, a library's object or a C++ object may hold the tensor: it must not stay behind."""
    live = torch.zeros(3)
    held_elsewhere = functools.partial(torch.sum, live)
    here = {"counts": live}

    carry({"counts": torch.ones(3)}, here)

    assert held_elsewhere().item() == here["counts"].sum().item() == 3.0


def test_a_tensor_that_an_optimizer_updates_is_left_to_the_repair() -> None:
    weight, live = torch.ones(3), torch.zeros(3)

    carry({"weight": weight}, {"weight": live}, stepped={weight.untyped_storage().data_ptr()})

    assert live.tolist() == [0.0, 0.0, 0.0]


LARGE = 40_000


def big(fill: float) -> torch.Tensor:
    return torch.full((LARGE,), fill)


def test_large_data_that_the_replay_has_loaded_alike_is_accepted() -> None:
    assert carry({"data": big(1.0)}, {"data": big(1.0)}) == []


@pytest.mark.parametrize(
    "live",
    [big(2.0), torch.ones(LARGE // 2), torch.ones(LARGE, dtype=torch.float64), None],
    ids=["data", "shape", "dtype", "none"],
)
def test_large_data_that_differs_is_a_mismatch(live: Any) -> None:
    (mismatch,) = carry({"data": big(1.0)}, {"data": live})

    assert mismatch.startswith("data ")


def activation() -> torch.Tensor:
    return big(1.0).requires_grad_() * 2


USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.shape,
    "method": lambda x: x.detach(),
    "plus": lambda x: x + 1,
    "right minus": lambda x: 1 - x,
    "power": lambda x: x**2,
    "matmul": lambda x: x @ x,
    "index": lambda x: x[0],
    "iteration": lambda x: list(x),
    "truth": lambda x: bool(x),
    "length": lambda x: len(x),
    "float": lambda x: float(x),
    "greater": lambda x: x > 0,
    "function of torch": lambda x: torch.sum(x),
    "int": lambda x: int(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_large_activation_of_the_step_before_says_so_when_it_is_used(use: str) -> None:
    here = {"logits": activation()}

    carry({"logits": activation()}, here)

    with pytest.raises((UnrecordedTensorError, TypeError)):
        USES[use](here["logits"])


SILENT_USES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda x: x == 1,
    "unequal": lambda x: x != 1,
    "printed": lambda x: f"{x}",
}


@pytest.mark.parametrize("use", SILENT_USES)
def test_a_large_activation_is_never_used_without_notice(use: str) -> None:
    here = {"logits": activation()}

    carry({"logits": activation()}, here)

    with pytest.raises(UnrecordedTensorError, match="logits of shape"):
        SILENT_USES[use](here["logits"])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.array(3), np.float32(1.5), np.int64(7), np.bool_(True), np.zeros((0, 3)),
        np.array(["ab", "c"]), np.datetime64("2026-01-01"), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["float", "0-d", "float32 scalar", "int64 scalar", "bool scalar", "empty", "text", "datetime", "fortran", "records"],
)  # fmt: skip
def test_a_small_array_comes_back(array: Any) -> None:
    here: Scope = {"x": None}

    carry({"x": array}, here)

    assert type(here["x"]) is type(array)
    assert here["x"].dtype == array.dtype
    assert np.array_equal(here["x"], array)


def test_two_names_for_one_array_stay_two_names_for_one_array() -> None:
    lost, live = np.ones(3), np.zeros(3)
    here = {"confusion": live, "metrics": {"confusion": live}}

    carry({"confusion": lost, "metrics": {"confusion": lost}}, here)
    here["confusion"] += 1

    assert here["metrics"]["confusion"].tolist() == [2.0, 2.0, 2.0]


def test_a_large_array_that_differs_is_a_mismatch() -> None:
    assert carry({"x": np.ones(LARGE)}, {"x": np.ones(LARGE)}) == []
    assert carry({"x": np.ones(LARGE)}, {"x": np.zeros(LARGE)}) == ["x holds other data than in the lost rank"]
    assert carry({"x": np.ones(LARGE)}, {"x": None}) == ["x is another array than in the lost rank"]


# Modules.


def trained(steps: int) -> Net:
    torch.manual_seed(steps)
    net = Net()
    for _ in range(steps):
        net(torch.randn(4, 3))
        net.seen += 1
    return net


def parameters_of(net: torch.nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}


def test_buffers_of_a_module_come_back_and_its_weights_are_left_to_the_repair() -> None:
    lost, live = trained(5), trained(1)
    weights = live.inner.weight.detach().clone()

    carry({"model": lost}, {"model": live}, stepped=parameters_of(lost))

    assert all(torch.equal(a, b) for a, b in zip(live.buffers(), lost.buffers(), strict=True))
    assert torch.equal(live.inner.weight, weights)
    assert (live.calls, list(live.recent)) == (5, [3, 4, 5])


def test_an_averaged_copy_of_a_model_comes_back_with_its_weights() -> None:
    lost = torch.optim.swa_utils.AveragedModel(trained(2))
    lost.update_parameters(trained(3))
    lost.update_parameters(trained(4))
    live = torch.optim.swa_utils.AveragedModel(trained(1))

    carry({"ema": lost}, {"ema": live})

    assert all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), lost.state_dict().values(), strict=True))


def test_a_part_of_a_model_under_a_name_of_its_own_is_recorded_once() -> None:
    lost, live = trained(5), trained(1)
    recorded, blobs = record({"norm": lost.norm, "model": lost, "again": lost})

    Restore(blobs, is_comparing=True).module({"norm": live.norm, "model": live, "again": live}, recorded, "")

    assert len(blobs) == len(list(lost.buffers())) + len(list(lost.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), lost.state_dict().values(), strict=True))


def test_a_module_with_a_buffer_of_another_shape_is_refused_with_its_name() -> None:
    lost = Net(3)

    with pytest.raises(CannotRestoreError, match=r"model\.norm\.running_mean of shape \[3\] is not in the replacement"):
        carry({"model": lost}, {"model": Net(4)}, stepped=parameters_of(lost))


def test_a_layer_that_was_set_to_evaluation_on_the_way_is_in_evaluation_or_refused() -> None:
    lost, live = Net(), Net()
    lost.norm.eval()

    refused = is_refused({"model": lost}, {"model": live})

    assert refused or (live.training, live.norm.training) == (True, False)


def test_a_layer_that_was_frozen_on_the_way_is_frozen_or_refused() -> None:
    lost, live = Net(), Net()
    lost.inner.requires_grad_(False)

    refused = is_refused({"model": lost}, {"model": live})

    assert refused or not live.inner.weight.requires_grad


def test_a_dropout_rate_that_was_changed_on_the_way_comes_back_or_is_refused() -> None:
    lost, live = Net(), Net()
    lost.drop.p = 0.1

    refused = is_refused({"model": lost}, {"model": live})

    assert refused or live.drop.p == 0.1


# Optimizers, schedulers, scaler.


def test_hyper_parameters_of_an_optimizer_come_back() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    lost = torch.optim.AdamW([weight], lr=0.5, betas=(0.8, 0.9), weight_decay=0.3)
    live = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    params = live.param_groups[0]["params"]

    carry({"optimizer": lost}, {"optimizer": live})

    group = live.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.3)
    assert group["params"] is params


def test_a_learning_rate_that_is_a_tensor_comes_back() -> None:
    lost = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    live = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))

    carry({"optimizer": lost}, {"optimizer": live})

    assert live.param_groups[0]["lr"].item() == 0.5


def test_an_optimizer_with_another_number_of_groups_is_refused() -> None:
    lost = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    lost.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    live = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)

    with pytest.raises(CannotRestoreError, match="optimizer is another optimizer"):
        carry({"optimizer": lost}, {"optimizer": live})


def test_a_counter_in_an_optimizer_of_the_users_own_comes_back_or_is_refused() -> None:
    lost, live = (CountingSgd([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    lost.lookahead_steps = 4

    refused = is_refused({"optimizer": lost}, {"optimizer": live})

    assert refused or live.lookahead_steps == 4


schedulers = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 9], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=8),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=6),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 1.0, step_size_up=3, mode="exp_range", gamma=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 10)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def optimizer_and(schedule: Callable[[Any], Any]) -> Scope:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": schedule(optimizer)}


def rates(scope: Scope, steps: int, *metrics: float) -> list[Any]:
    found = []
    for at in range(steps):
        scope["optimizer"].step()
        scope["schedule"].step(*metrics[at : at + 1])
        group = scope["optimizer"].param_groups[0]
        found.append([group["lr"], group["momentum"], *scope["schedule"].get_last_lr()])
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_as_in_the_lost_rank(kind: str) -> None:
    lost, here = optimizer_and(SCHEDULES[kind]), optimizer_and(SCHEDULES[kind])
    rates(lost, 7)

    carry(lost, here)

    assert rates(here, 6) == rates(lost, 6)


def test_a_schedule_that_waits_for_a_plateau_goes_on_as_in_the_lost_rank() -> None:
    lost, here = (optimizer_and(lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5)) for _ in range(2))
    rates(lost, 3, 1.0, 0.9, 0.95)

    carry(lost, here)

    assert rates(here, 4, 0.95, 0.95, 0.95, 0.1) == rates(lost, 4, 0.95, 0.95, 0.95, 0.1)


def test_a_gradient_scaler_comes_back_also_if_the_replacement_has_not_used_it() -> None:
    lost, live = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        lost.scale(weight.sum()).backward()
        lost.step(optimizer)
        lost.update()

    carry({"scaler": lost}, {"scaler": live})

    assert lost.get_scale() == 16.0
    assert live.get_scale() == 16.0
    assert live.state_dict() == lost.state_dict()


# Random generators.

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda rng: [rng.random(), rng.gauss(0, 1), rng.gauss(0, 1)]),
    "numpy default_rng": (
        np.random.default_rng,
        lambda rng: rng.normal(size=3).tolist() + rng.integers(9, size=3).tolist(),
    ),
    "numpy MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda rng: rng.normal(size=3).tolist(),
    ),
    "numpy Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda rng: rng.normal(size=3).tolist()),
    "numpy RandomState": (np.random.RandomState, lambda rng: rng.normal(size=3).tolist()),
    "numpy RandomState over PCG64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda rng: rng.normal(size=3).tolist(),
    ),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda rng: torch.rand(3, generator=rng).tolist(),
    ),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_random_generator_draws_on_as_in_the_lost_rank(kind: str) -> None:
    make, draw = GENERATORS[kind]
    lost, live = make(1), make(2)
    draw(lost)

    carry({"rng": lost, "same": lost}, {"rng": live, "same": live})

    assert draw(live) == draw(lost)


def test_another_kind_of_random_generator_is_refused() -> None:
    with pytest.raises(CannotRestoreError, match="rng is another random generator"):
        carry({"rng": random.Random(1)}, {"rng": np.random.default_rng(1)})


def test_a_generator_that_draws_from_the_system_does_not_end_the_protection() -> None:
    here = {"rng": random.SystemRandom(), "step": 0}

    carry({"rng": random.SystemRandom(), "step": 2}, here)

    assert here["step"] == 2


# Nothing stale: what is on one side only, what moves, what only its own process knows.


def test_a_name_that_the_lost_rank_has_deleted_is_not_in_the_replacement() -> None:
    here: Scope = {"step": 0, "batch": [1], "scratch": 2}

    carry({"step": 1, "batch": [1]}, here)

    assert here == {"step": 1, "batch": [1]}


def test_what_the_replacement_has_not_made_and_cannot_make_is_refused_with_its_name() -> None:
    with pytest.raises(
        CannotRestoreError, match="writer is a Logger in the lost rank, cannot be recorded, and is not set"
    ):
        carry({"writer": logging.getLogger("x")}, {})


def test_on_the_way_to_the_boundary_what_does_not_fit_is_left_as_it_is() -> None:
    recorded, blobs = record({"step": 7, "writer": logging.getLogger("x"), "meter": Meter(), "data": big(1.0)})
    here: Scope = {"step": 1, "data": None}

    Restore(blobs, is_comparing=False).module(here, recorded, "")

    assert here == {"step": 7, "data": None}


REPRODUCED: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock, "event": threading.Event, "logger": lambda: logging.getLogger("a"), "parser": argparse.ArgumentParser,
    "progress bar": lambda: tqdm.tqdm(range(3), disable=True), "file": lambda: sys.__stdout__, "context": contextlib.nullcontext,
    "pattern": lambda: re.compile("a+"), "data set": lambda: TensorDataset(torch.zeros(3)), "weak reference": lambda: weakref.ref(Meter),
    "lambda": lambda: (lambda x: x), "partial": lambda: functools.partial(print, end=""), "cache": lambda: functools.lru_cache(math.sin),
    "module": lambda: torch, "exception": lambda: ValueError("bad"), "no grad": torch.no_grad, "autocast": lambda: torch.autocast("cpu"),
    "property": lambda: property(math.sin), "keys": lambda: {"a": 1}.keys(), "object": object, "queue": queue.Queue,
    "loader": lambda: DataLoader(TensorDataset(torch.zeros(3))), "thread": threading.Thread, "summary": lambda: struct.Struct("<q"),
    "ufunc": lambda: np.add, "builtin method": lambda: [].append, "library function": lambda: torch.nn.functional.relu,
}  # fmt: skip


@pytest.mark.parametrize("kind", REPRODUCED)
def test_what_ordinary_scripts_have_in_variables_does_not_hinder_a_recovery(kind: str) -> None:
    here: Scope = {"thing": REPRODUCED[kind](), "step": 0, "holder": types.SimpleNamespace(it=[REPRODUCED[kind]()])}
    lost: Scope = {"thing": REPRODUCED[kind](), "step": 3, "holder": types.SimpleNamespace(it=[REPRODUCED[kind]()])}
    thing = here["thing"]

    assert carry(lost, here) == []

    assert here["step"] == 3
    assert type(here["thing"]) is type(thing)


def test_the_name_of_a_file_that_was_closed_long_ago_does_not_hinder_a_recovery(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "log", "w") as file:
        file.write("x")
    here: Scope = {}

    carry({"file": file}, here)

    assert here["file"].closed
    with pytest.raises(ValueError, match="closed"):
        here["file"].write("y")


CARRIED: dict[str, tuple[Any, Any]] = {
    "time zone": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), None),
    "flags": (re.IGNORECASE | re.DOTALL, re.IGNORECASE),
    "uuid": (uuid.UUID(int=7), None),
    "ellipsis": (..., None),
    "number of a class of its own": (np.float64(2.5), 1.5),
    "buffer": (io.StringIO("abc"), io.StringIO()),
    "array": (array.array("d", [1.0, 2.0]), array.array("d")),
    "chain map": (collections.ChainMap({"a": 1}), collections.ChainMap({"a": 0})),
    "queue": (queue.SimpleQueue, queue.Queue),
    "local time": (time.gmtime(5), time.gmtime(0)),
    "slice": (slice(1, None), slice(None)),
    "bound method": (math.cos, "text"),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_a_value_of_the_standard_library_comes_back(kind: str) -> None:
    lost, live = CARRIED[kind]
    here: Scope = {"x": live}

    carry({"x": lost}, here)

    assert type(here["x"]) is type(lost)
    assert getattr(here["x"], "getvalue", lambda: here["x"])() == getattr(lost, "getvalue", lambda: lost)()


def test_a_counter_in_a_closure_comes_back() -> None:
    lost, live = user_values.make_counter(), user_values.make_counter()
    assert [lost(), lost(), lost()] == [1, 2, 3]

    carry({"count": lost}, {"count": live})

    assert live() == 4


def test_a_counter_on_a_function_comes_back() -> None:
    recorded_calls = user_values.make_counter()
    recorded_calls.calls = 5
    live = user_values.make_counter()
    live.calls = 1

    carry({"f": recorded_calls}, {"f": live})

    assert live.calls == 5


def test_a_bound_method_stays_bound_to_the_object_of_its_name() -> None:
    lost, live = Meter(), Meter()
    lost.update(2.0)
    here = {"meter": live, "update": live.update}

    carry({"meter": lost, "update": lost.update}, here)
    here["update"](3.0)

    assert here["meter"].values == [2.0, 3.0]


def test_a_checkpoint_of_the_weights_that_is_left_in_a_variable_is_made_of_the_replacements_own_weights() -> None:
    """As nanoGPT leaves one behind: its tensors are the weights themselves, and go on changing with them."""
    lost, live = Net(), Net()
    storages = {p.untyped_storage().data_ptr(): i for i, p in enumerate(lost.parameters())}
    snapshot = Snapshot(storages)
    checkpoint = {"model": {n: p.detach() for n, p in lost.named_parameters()}, "iter": 5}
    recorded = values.unpack(values.pack(snapshot.variables({"model": lost, "checkpoint": checkpoint})))
    blobs = as_the_recorder_writes_them(snapshot.blobs)
    here: Scope = {"model": live}

    Restore(blobs, True, list(live.parameters())).module(here, recorded, "")
    with torch.no_grad():
        live.inner.weight.fill_(3.0)

    assert here["checkpoint"]["iter"] == 5
    assert here["checkpoint"]["model"]["inner.weight"].unique().tolist() == [3.0]


def test_a_large_tensor_that_the_script_changes_is_carried() -> None:
    lost, here = {"bank": big(0.0)}, {"bank": big(0.0)}
    record(lost)
    lost["bank"][100:200] = 7.0

    assert carry(lost, here) == []

    assert torch.equal(here["bank"], lost["bank"])


def test_a_large_tensor_that_is_changed_behind_its_version_counter_is_carried_too() -> None:
    lost, here = {"ema": big(1.0)}, {"ema": big(1.0)}
    record(lost)
    lost["ema"].data.mul_(0.5)

    carry(lost, here)

    assert torch.equal(here["ema"], lost["ema"])


def test_a_large_array_that_the_script_changes_is_carried() -> None:
    lost, here = {"buffer": np.zeros(LARGE)}, {"buffer": np.zeros(LARGE)}
    record(lost)
    lost["buffer"][17] = 4.0

    carry(lost, here)

    assert here["buffer"][17] == 4.0


def test_a_single_element_of_large_data_that_differs_is_a_mismatch() -> None:
    live = big(1.0)
    live[12_345] = 2.0

    assert carry({"data": big(1.0)}, {"data": live}) == ["data holds other data than in the lost rank"]


def test_a_tensor_that_was_recorded_can_still_be_resized() -> None:
    tensor = torch.zeros(4)

    record({"x": tensor, "large": big(1.0)})

    assert tensor.resize_(8).shape == (8,)


def test_the_attributes_of_a_library_module_that_change_each_step_come_back_each_time() -> None:
    lost = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(2, 2))
    live = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(2, 2))
    for step in range(4):
        values.begin_boundary()
        lost[0].p = 0.1 * step
        lost.train(step % 2 == 0)
        carry({"model": lost}, {"model": live}, stepped=parameters_of(lost))

        assert (live[0].p, live.training, live[1].training) == (lost[0].p, lost.training, lost.training)


def test_a_submodule_under_a_name_of_its_own_is_the_one_of_the_model() -> None:
    lost, live = Net(), Net()
    here: Scope = {"model": live, "head": live.norm}

    carry({"model": lost, "head": lost.inner}, here)

    assert here["head"] is live.inner


def test_a_view_of_an_array_stays_a_view() -> None:
    lost, live = np.ones(4), np.zeros(4)
    here = {"stats": live, "first": live[:1], "other": None}

    carry({"stats": lost, "first": lost[:1], "other": lost[2:]}, here)
    here["stats"].fill(8)

    assert (here["first"].tolist(), here["other"].tolist()) == ([8.0], [8.0, 8.0])


@pytest.mark.parametrize(
    "make",
    [lambda: itertools.chain([1, 2], [3, 4, 5]), lambda: itertools.islice([1, 2, 3, 4, 5], 5), lambda: iter({1: 2, 3: 4, 5: 6, 7: 8}),
     lambda: filter(None, [1, 2, 3, 4]), lambda: zip([1, 2, 3, 4], itertools.count(), strict=False), lambda: iter(range(9))],
)  # fmt: skip
def test_an_iterator_of_any_other_kind_goes_on_or_is_refused(make: Callable[[], Any]) -> None:
    lost, here = make(), {"stream": make()}
    next(lost)
    next(lost)

    refused = is_refused({"stream": lost}, here)

    assert refused or list(here["stream"]) == list(lost)


def test_an_iterator_at_its_end_is_at_its_end_and_its_list_is_left_alone() -> None:
    items = [1, 2, 3]
    lost = iter([1, 2, 3])
    assert list(lost) == [1, 2, 3]
    here = {"stream": iter(items), "items": items}

    carry({"stream": lost, "items": [1, 2, 3]}, here)

    assert list(here["stream"]) == []
    assert here["items"] is items
    assert items == [1, 2, 3]


def test_an_object_of_an_extension_module_is_compared() -> None:
    assert is_refused({"x": operator.itemgetter(1)}, {"x": None})
    assert not is_refused({"x": decimal.Context(prec=5)}, {"x": decimal.Context(prec=5)})
    assert is_refused({"x": decimal.Context(prec=5)}, {"x": decimal.Context(prec=6)})
    assert is_refused({"x": hashlib.sha256(b"a")}, {"x": hashlib.sha256(b"b")})


def test_nothing_in_a_record_can_call_what_the_script_has_not_made() -> None:
    """A record names functions and types; it never calls a function, and makes only values of known kinds."""
    struck: list[int] = []
    here: Scope = {"x": 0, "strike": lambda: struck.append(1)}

    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ["l", 0, [], "os:system", {}]}, "")
    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ["v", "subprocess:Popen", {"args": "true"}]}, "")

    assert struck == []
