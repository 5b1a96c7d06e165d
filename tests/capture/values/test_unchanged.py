"""Lists and dictionaries count as unchanged only if they hold the very same objects in the same order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.capture.values import changes
from ttprun.capture.values.changes import Piece, Remembered, begin_boundary


@pytest.fixture(params=["versions", "no versions"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With and without versions of dictionaries."""
    monkeypatch.setattr(changes, "ARE_COUNTED", request.param == "versions" and changes.ARE_COUNTED)
    return Piece


def test_a_dictionary_that_holds_again_what_it_held_counts_as_unchanged(known: Any) -> None:
    swapped = {"weight": object()}
    held = known([swapped])
    whole = swapped["weight"]

    swapped["weight"] = object()
    assert not held.holds()
    swapped["weight"] = whole

    assert held.holds()


def test_an_attribute_that_is_set_is_seen_each_time(known: Any) -> None:
    held = SimpleNamespace(count=0)
    module = torch.nn.Linear(1, 1)
    found = []

    for count in range(100):
        of_each = [known([vars(one)]) for one in (held, module)]
        found.append([one.holds() for one in of_each])
        held.count = count + 1000
        module.count = count + 1000  # type: ignore[assignment]
        found.append([one.holds() for one in of_each])

    assert found == [[True, True], [False, False]] * 100


def test_what_is_not_asked_for_at_a_boundary_is_forgotten_at_the_next() -> None:
    remembered: Remembered[str] = Remembered()
    remembered.keep("a", "asked for")
    remembered.keep("b", "not asked for")

    for _ in range(3):
        begin_boundary()
        assert remembered.get("a") == "asked for"

    assert remembered.get("b") is None


LIST_CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "an item replaced by an equal one": lambda one: one.__setitem__(40_000, float(one[40_000])),
    "the first item replaced": lambda one: one.__setitem__(0, object()),
    "the last item replaced": lambda one: one.__setitem__(-1, object()),
    "two items swapped": lambda one: one.__setitem__(slice(7, 9), one[7:9][::-1]),
    "an item taken away": lambda one: one.pop(),
    "as many items again": lambda one: one.extend(one),
    "another memory, with another item": lambda one: one.__setitem__(slice(None), [*one[:-1], object()]),
}


@pytest.mark.parametrize("change", LIST_CHANGES)
@pytest.mark.parametrize("are_known", [True, False], ids=["addresses known", "addresses unknown"])
def test_each_change_of_a_long_list_is_seen(change: str, are_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "HAVE_ADDRESSES", are_known and changes.HAVE_ADDRESSES)
    items: list[Any] = [float(number) for number in range(50_000)]
    first = items.copy()
    items[40_000] = first[40_000] = 40_000

    assert changes.begins_with(items, first)
    LIST_CHANGES[change](items)
    assert changes.begins_with(items, first) == (change == "as many items again")
