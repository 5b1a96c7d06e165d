"""Objects, classes, functions and their attributes: what a replacement gets back of them."""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import datetime
import decimal
import enum
import functools
import logging
import math
import operator
import pathlib
import queue
import re
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.weak
from torch.utils.data import Subset, TensorDataset

from tests.capture import user_values
from tests.capture.user_values import (
    Bare,
    FrozenState,
    Holder,
    Meter,
    NamedCounts,
    SlotsNamedTwice,
    SlottedState,
    Stage,
    State,
    Trainer,
)
from tests.capture.values.carrying import (
    Scope,
    carry,
    is_refused,
    not_proved,
    record,
)
from ttprun import frameworks
from ttprun.capture.records.packing import MISSING, name_of
from ttprun.capture.values import CannotRestoreError, Restore
from ttprun.capture.values.restore import unlike


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
    with pytest.raises(CannotRestoreError, match="best is a State in the lost rank, and the replacement has a Meter"):
        carry({"best": State()}, {"best": Meter()})


@pytest.mark.parametrize("here", [{"meter": None, "same": None}, {}], ids=["None", "not set"])
def test_an_object_that_the_replacement_has_not_made_is_made_again_from_its_attributes(here: Scope) -> None:
    """An evaluation makes it when it first has a result, say, which the replay has passed over."""
    lost = Meter()
    lost.update(3.0)

    carry({"meter": lost, "same": [lost]}, here)

    assert (type(here["meter"]), vars(here["meter"])) == (Meter, vars(lost))
    assert here["same"] == [here["meter"]]


@pytest.mark.parametrize("is_comparing", [False, True], ids=["on the way", "at the boundary"])
def test_an_object_that_would_lack_an_attribute_is_not_made_again(is_comparing: bool) -> None:
    """Lightning's writer of metrics has a file system, which no record holds: the logger makes it when it needs it."""
    lost = Bare()
    vars(lost).update(files=logging.getLogger("x"), rows=[1])
    here: Scope = {"writer": None, "same": None}
    recorded, blobs = record({"writer": lost, "same": [lost]})

    restore = Restore(blobs, is_comparing, is_strict=False)
    restore.module(here, recorded, "")

    assert here == {"writer": None, "same": None}
    assert bool(restore.doubts) is is_comparing


def test_an_object_that_is_more_than_its_attributes_is_not_made_again() -> None:
    with pytest.raises(
        CannotRestoreError, match="owner is a Holder in the lost rank, and the replacement has a NoneType"
    ):
        carry({"owner": Holder()}, {"owner": None})


@pytest.mark.parametrize(
    ("lost", "live"),
    [(SlottedState(3, 0.5), SlottedState()), (FrozenState(3, 99), FrozenState())],
    ids=["slots", "frozen"],
)
def test_a_dataclass_of_any_kind_comes_back_or_is_refused(lost: Any, live: Any) -> None:
    here = {"state": live}

    refused = is_refused({"state": lost}, here)

    assert refused or here["state"] == lost


def test_an_object_whose_class_names_a_slot_twice_comes_back() -> None:
    live = SlotsNamedTwice(1, 0.5)

    carry({"state": SlotsNamedTwice(6, 0.25)}, {"state": live})

    assert (live.step, live.best) == (6, 0.25)


def test_a_frozen_object_that_is_shared_does_not_change_under_its_other_name() -> None:
    first = FrozenState(0, 0)
    here = {"start": first, "present": first}

    refused = is_refused({"start": FrozenState(0, 0), "present": FrozenState(5, 50)}, here)

    assert refused or here == {"start": FrozenState(0, 0), "present": FrozenState(5, 50)}


def test_counters_on_a_class_come_back() -> None:
    class_of_user = user_values.Meter
    recorded, _ = record({"Meter": class_of_user})
    recorded["Meter"].attributes["total_made"] = 41

    Restore([], is_comparing=True).module({"Meter": class_of_user}, recorded, "")
    found, class_of_user.total_made = class_of_user.total_made, 0

    assert found == 41


def test_a_module_that_is_not_found_by_its_name_stays_if_it_is_of_the_same_name() -> None:
    """`from tokenizers import trainers` gives a part of a Rust extension, whose name is `trainers` alone."""
    here = {"trainers": (live := types.ModuleType("trainers"))}

    mismatches = carry({"trainers": types.ModuleType("trainers")}, here)

    assert not mismatches
    assert here["trainers"] is live
    assert is_refused({"trainers": types.ModuleType("trainers")}, {"trainers": types.ModuleType("models")})


def test_variables_of_a_users_file_that_was_run_as_a_module_by_hand_come_back() -> None:
    lost, live = types.ModuleType("config"), types.ModuleType("config")
    for module, rate in ((lost, 0.1), (live, 0.3)):
        vars(module).update(__file__=user_values.__file__, __builtins__=vars(builtins), rate=rate)
    here = {"config": live}

    mismatches = carry({"config": lost}, here)

    assert not mismatches
    assert here["config"] is live
    assert live.rate == 0.1


@pytest.mark.parametrize("held", [Bare, (Bare, 1), {"kind": Bare}], ids=["class", "tuple", "dictionary"])
def test_an_attribute_that_a_class_without_any_is_given_behind_the_first_boundary_comes_back(held: Any) -> None:
    lost: Scope = {"held": held, "step": 0}
    for lost["step"] in range(2):
        record(lost, key=str(held))

    Bare.best = 7  # type: ignore[attr-defined]
    recorded, blobs = record(lost, key=str(held))
    del Bare.best  # type: ignore[attr-defined]
    Restore(blobs, is_comparing=True).module({"held": held, "step": 0}, recorded, "")

    found = vars(Bare).get("best")
    del Bare.best  # type: ignore[attr-defined]
    assert found == 7


def test_a_set_of_classes_comes_back() -> None:
    """As the classes that FSDP is to wrap are named."""
    here: Scope = {"wrapped": {Bare}, "fixed": None}

    carry({"Bare": Bare, "wrapped": {Bare, Meter, torch.nn.Linear}, "fixed": frozenset({Meter})}, here)

    assert here["wrapped"] == {Bare, Meter, torch.nn.Linear}
    assert here["fixed"] == {Meter}


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


CARRIED: dict[str, tuple[Any, Any]] = {
    "time zone": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), None),
    "flags": (re.IGNORECASE | re.DOTALL, re.IGNORECASE),
    "ellipsis": (..., None),
    "number of a class of its own": (np.float64(2.5), 1.5),
    "array": (array.array("d", [1.0, 2.0]), array.array("d")),
    "chain map": (collections.ChainMap({"a": 1}), collections.ChainMap({"a": 0})),
    "queue": (queue.SimpleQueue, queue.Queue),
    "local time": (time.gmtime(5), time.gmtime(0)),
    "slice": (slice(1, None), slice(None)),
    "bound method": (math.cos, "text"),
    "pattern": (re.compile("a+"), re.compile("b")),
}
GETTERS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "itemgetter": (operator.itemgetter(1, "b", slice(3)), operator.itemgetter(0), lambda x: x.__reduce__()),
    "attrgetter": (operator.attrgetter("a.b"), operator.attrgetter("c"), lambda x: x.__reduce__()),
}


@pytest.mark.parametrize("kind", GETTERS)
def test_what_was_made_of_other_arguments_is_made_anew(kind: str) -> None:
    lost, live, digest_of = GETTERS[kind]
    here: Scope = {"x": live, "holder": [live]}

    assert carry({"x": lost, "holder": [lost]}, here) == []

    assert digest_of(here["x"]) == digest_of(here["holder"][0]) == digest_of(lost)
    assert not_proved({"x": lost}) == []


COMPARED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "methodcaller": (lambda: operator.methodcaller("m", 1, k=2), lambda: operator.methodcaller("m", 1, k=3)),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_what_few_programs_change_is_compared_and_refused_if_it_differs(kind: str) -> None:
    make, make_other = COMPARED[kind]

    assert carry({"x": make()}, {"x": make()}) == []
    assert not_proved({"x": make()}) == []
    with pytest.raises(CannotRestoreError, match="differs from the lost rank's, and cannot be recorded"):
        carry({"x": make()}, {"x": make_other()})


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


def test_indices_that_were_added_to_a_part_of_a_dataset_come_back() -> None:
    rows = TensorDataset(torch.arange(4))
    live = Subset(rows, [0])

    carry({"labeled": Subset(rows, [0, 3])}, {"labeled": live})

    assert live.indices == [0, 3]


def given(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def test_work_of_a_thread_that_has_given_the_same_is_accepted() -> None:
    assert carry({"ahead": [given(torch.ones(3))]}, {"ahead": [given(torch.ones(3))]}) == []


@pytest.mark.parametrize(
    ("lost", "live"),
    [(given(torch.ones(3)), given(torch.zeros(3))), (Future(), Future()), (given(1), Future())],
    ids=["another result", "not done", "not done here"],
)
def test_work_of_a_thread_that_gives_something_else_or_is_not_done_is_refused(lost: Any, live: Any) -> None:
    """Batches that a pool of threads fetches ahead: a replay asks for other ones."""
    assert is_refused({"ahead": deque([lost])}, {"ahead": deque([live])})


def test_what_is_local_to_a_thread_comes_back() -> None:
    lost, live = threading.local(), threading.local()
    lost.calls = 3

    carry({"local": lost}, {"local": live})

    assert live.calls == 3


class Loader:
    """Something that is referred to weakly."""


def test_a_weak_reference_is_to_the_counterpart_of_what_it_was_to() -> None:
    lost_loader, live_loader = Loader(), Loader()
    lost: Scope = {"loader": lost_loader, "active": [None, weakref.ref(lost_loader), weakref.ref(lost_loader)]}
    live: Scope = {"loader": live_loader, "active": [None, weakref.ref(live_loader)]}

    mismatches = carry(lost, live)

    assert not mismatches
    assert [one and one() for one in live["active"]] == [None, live_loader, live_loader]


def test_a_weak_reference_to_what_is_gone_is_to_nothing_again() -> None:
    live_loader = Loader()
    live: Scope = {"loader": live_loader, "active": weakref.ref(live_loader)}

    mismatches = carry({"loader": Loader(), "active": weakref.ref(Loader())}, live)

    assert not mismatches
    assert live["active"]() is None


def test_a_weak_proxy_stays_one() -> None:
    loader = Loader()
    here: Scope = {"loader": loader, "strategy": weakref.proxy(loader)}
    carry({"loader": loader, "strategy": weakref.proxy(loader)}, here)

    assert type(here["strategy"]) is weakref.ProxyType


def test_an_object_that_a_framework_makes_when_it_needs_it_is_made_and_given_what_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's strategy makes what writes checkpoints at the first checkpoint, which a replay passes over."""
    monkeypatch.setattr(frameworks, "MADE", {f"{__name__}:Loader": None})
    lost: Scope = {"writer": Loader(), "again": None}
    lost["writer"].written = 3
    lost["again"] = lost["writer"]
    here: Scope = {"writer": None, "again": None}

    carry(lost, here)

    assert here["writer"].written == 3
    assert here["again"] is here["writer"]


@pytest.mark.parametrize("module", ["library.one", "library.other"])
def test_a_reason_never_names_the_same_type_for_both_ranks(module: str) -> None:
    one, other = (type("State", (), {"__module__": name}) for name in ("library.one", module))

    reason = unlike("best", name_of(one), other())

    assert reason in (
        "best is a State in the lost rank, and the replacement has another one",
        f"best is a {name_of(one)} in the lost rank, and the replacement has a {name_of(other)}",
    )


@pytest.mark.parametrize(
    ("live", "here"), [(len, "a builtin_function_or_method"), (lambda: 0, "another one"), (MISSING, "nothing")]
)
def test_a_reason_says_what_is_there_instead_of_a_function(live: Any, here: str) -> None:
    reason = unlike("draw", "builtins:function", live, "the function m:draw:3")

    assert reason == f"draw is the function m:draw:3 in the lost rank, and the replacement has {here}"


def members_of_a_local_class() -> tuple[enum.Enum, enum.Enum, enum.Flag]:
    """Such a class cannot be looked up by its name."""

    class Local(enum.Enum):
        FIRST = 1
        SECOND = 2

    class Flags(enum.Flag):
        A = 1
        B = 2

    return Local.FIRST, Local.SECOND, Flags.A | Flags.B


def test_a_member_of_an_enum_that_a_function_makes_is_restored_in_the_replacements_own() -> None:
    lost, here = members_of_a_local_class(), members_of_a_local_class()
    scope = {"unchanged": here[0], "changed": here[0], "flags": here[2]}

    doubts = carry({"unchanged": lost[0], "changed": lost[1], "flags": lost[2]}, scope)

    assert doubts == []
    assert scope == {"unchanged": here[0], "changed": here[1], "flags": here[2]}
