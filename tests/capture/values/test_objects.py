"""Objects, classes, functions and their attributes: what a replacement gets back of them."""

from __future__ import annotations

import builtins
import enum
import gc
import logging
import random
import types
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.utils.weak

from tests.capture import user_values
from tests.capture.user_values import (
    Bare,
    Meter,
    count_up,
)
from tests.capture.values.carrying import (
    Scope,
    carry,
    is_refused,
    record,
)
from ttprun import frameworks
from ttprun.capture import values
from ttprun.capture.records.packing import MISSING, name_of
from ttprun.capture.values import Restore
from ttprun.capture.values.restore import unlike


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


class Loader:
    """Something that is referred to weakly."""


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


def test_a_generator_that_draws_from_the_system_does_not_end_the_protection() -> None:
    here = {"rng": random.SystemRandom(), "step": 0}

    carry({"rng": random.SystemRandom(), "step": 2}, here)

    assert here["step"] == 2


def test_a_suspended_generator_of_the_user_goes_on_where_the_lost_ranks_stood() -> None:
    lost, live = count_up(10), count_up(0)
    assert [next(lost) for _ in range(5)] == [11, 12, 13, 14, 15]
    next(live)

    carry({"numbers": lost}, {"numbers": live})

    assert next(live) == 16


def test_an_iterator_at_its_end_is_at_its_end_and_its_list_is_left_alone() -> None:
    items = [1, 2, 3]
    lost = iter([1, 2, 3])
    assert list(lost) == [1, 2, 3]
    here = {"stream": iter(items), "items": items}

    carry({"stream": lost, "items": [1, 2, 3]}, here)

    assert list(here["stream"]) == []
    assert here["items"] is items
    assert items == [1, 2, 3]


def test_what_the_script_has_dropped_is_let_go_of() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    scope = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 10), "step": 1}
    dropped = weakref.ref(optimizer)
    for _ in range(2):
        values.begin_boundary()
        record(scope, key="train", is_lasting=True)
    del optimizer, scope["schedule"]

    values.let_go()
    gc.collect()

    assert dropped() is None
