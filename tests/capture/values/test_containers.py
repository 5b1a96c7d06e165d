"""Plain values and containers: what a replacement gets back of them."""

from __future__ import annotations

import contextvars
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capture.user_values import (
    Meter,
    Point,
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
from ttprun.capture.values import Restore
from ttprun.capture.values.changes import Clock


@pytest.mark.parametrize("text", ["\ud800", "file-\udcff"], ids=["lone surrogate", "undecodable file name"])
def test_a_text_that_is_no_unicode_does_not_end_the_protection_of_the_rank(text: str) -> None:
    here: Scope = {"name": "x", "step": 0}

    carry({"name": text, "step": 4}, here)

    assert here["step"] == 4


@pytest.mark.parametrize("count", [2, 40])
def test_a_dict_and_a_set_of_ids_have_those_of_the_replacements_objects(count: int) -> None:
    lost: Scope = {"meters": [Meter() for _ in range(count)]}
    lost |= {"places": {id(one): at for at, one in enumerate(lost["meters"])}, "all": set(map(id, lost["meters"]))}
    here: Scope = {"meters": [Meter() for _ in range(count)], "places": {}, "all": set()}

    mismatches = carry(lost, here)

    assert mismatches == []
    assert here["places"] == {id(one): at for at, one in enumerate(here["meters"])}
    assert here["all"] == set(map(id, here["meters"]))


def test_things_that_cannot_be_recorded_stay_where_they_are_in_a_list() -> None:
    callback = functools.partial(print)
    here = {"hooks": [callback, 1]}

    carry({"hooks": [functools.partial(print), 2]}, here)

    assert here["hooks"] == [callback, 2]


def test_a_long_list_of_another_length_is_a_mismatch_if_a_step_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "records", 2)

    assert carry({"losses": [0.0] * LONG}, {"losses": [0.0] * 5}) == ["losses is a long container of another length"]


def test_a_long_list_of_the_set_up_comes_back_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "records", 1)
    here = {"losses": [0.0] * 5}

    assert carry({"losses": [0.0] * LONG}, here) == []
    assert here == {"losses": [0.0] * LONG}


def test_what_is_not_proved_beside_a_long_dict_is_named() -> None:
    scope = {"places": {number: 1000 * number for number in range(40)}, "kept": contextvars.ContextVar("kept")}

    named = not_proved(scope)

    assert [one.partition(" ")[0] for one in named] == ["kept"]


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


def test_a_long_list_that_has_grown_is_known_from_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "records", 2)
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


def test_what_cannot_be_recorded_is_named_in_each_variable_that_holds_it() -> None:
    """In the first of them it may not matter: one that the script sets again before it reads it."""
    changing = {Point(1, 2), Point(3, 4)}

    recorded, _ = record({"dead": changing, "alive": [changing]})

    nodes = [recorded["dead"], *recorded["alive"].items]
    assert [type(node) for node in nodes] == [RefusedNode, RefusedNode]
