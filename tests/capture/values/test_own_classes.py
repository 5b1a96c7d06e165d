"""Classes of the script's that override what Python asks them: nothing of that is run by a record or a recovery."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.capture import user_values
from tests.capture.user_values import Touchy, TouchyCounter, TouchyDict, TouchyList, TouchyOrder, TouchySet, TouchyText
from tests.capture.values.carrying import Scope, are_alike, carry, is_refused, not_proved, record


def ordered(**items: Any) -> TouchyOrder:
    made = TouchyOrder()
    for key, value in items.items():
        collections.OrderedDict.__setitem__(made, key, value)
    return made


LOST: dict[str, Callable[[], Any]] = {
    "dictionary": lambda: TouchyDict({"a": 1, "b": [2]}),
    "ordered dictionary": lambda: ordered(a=1, b=[2]),
    "default dictionary": lambda: TouchyCounter(list, {"a": 1}),
    "list": lambda: TouchyList([1, [2]]),
    "set": lambda: TouchySet({1, 2}),
    "text": lambda: TouchyText("abc"),
    "object": lambda: Touchy(7),
}
HELD: dict[str, Callable[[Any], Any]] = {
    "dictionary": lambda x: list(dict.items(x)),
    "ordered dictionary": lambda x: list(collections.OrderedDict.items(x)),
    "default dictionary": lambda x: list(dict.items(x)),
    "list": lambda x: list(list.__iter__(x)),
    "set": lambda x: set(set.__iter__(x)),
    "text": lambda x: str.__str__(x),
    "object": lambda x: user_values.held_by(x),
}


@pytest.mark.parametrize("kind", LOST)
def test_nothing_that_a_class_overrides_is_run_by_a_recovery(kind: str) -> None:
    lost, live = LOST[kind](), LOST[kind]()
    expected = HELD[kind](lost)
    here: Scope = {"x": live, "all": [LOST[kind]()]}
    user_values.touched.clear()

    assert carry({"x": lost, "all": [lost]}, here) == []

    assert user_values.touched == []
    assert HELD[kind](here["x"]) == expected


def test_entries_of_a_lazy_registry_that_were_added_come_back() -> None:
    lost, live = ordered(a=1), ordered(a=1, z=0)
    collections.OrderedDict.__setitem__(lost, "b", 2)
    collections.OrderedDict.move_to_end(lost, "a")

    carry({"x": lost}, {"x": live})

    assert list(collections.OrderedDict.items(live)) == [("b", 2), ("a", 1)]


def chain(length: int, end: Any) -> Any:
    found: Any = end
    for number in range(length):
        found = user_values.Link(number, found)
    return found


def last_of(one: Any) -> Any:
    while isinstance(one, user_values.Link):
        one = one.next
    return one


@pytest.mark.parametrize("length", [20, 99])
def test_what_is_nested_deeply_comes_back(length: int) -> None:
    lost, live = chain(length, ["new"]), chain(length, ["old"])

    assert carry({"x": lost}, {"x": live}) == []

    assert last_of(live) == ["new"]
    assert not_proved({"x": lost}) == []


def test_what_is_nested_deeply_does_not_depend_on_the_stack_of_who_calls() -> None:
    lost = chain(90, ["new"])

    def call(depth: int) -> Any:
        return record({"x": lost}) if depth == 0 else call(depth - 1)

    here = call(0)
    limit = sys.getrecursionlimit()

    assert are_alike(call(limit - 250), here)


def test_what_is_nested_beyond_measure_is_named() -> None:
    (named,) = not_proved({"x": chain(120, 0)})

    assert "it is nested more than" in named


def test_objects_beyond_the_budget_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttprun.capture.values.snapshot.MAX_OBJECTS", 5)

    named = not_proved({"x": [[number] for number in range(8)], "y": user_values.Meter()})

    assert named[-1].startswith("y (tests.capture.user_values.Meter): it comes after the 5 objects")


def test_an_object_that_cannot_be_read_just_now_does_not_cost_the_others_their_record() -> None:
    class Broken(random.Random):
        def getstate(self) -> Any:
            raise KeyError("lazy")

    assert is_refused({"x": Broken(), "step": 1}, {"x": Broken(), "step": 0})
    assert record({"x": Broken(), "step": 1})[0]["step"] == 1
