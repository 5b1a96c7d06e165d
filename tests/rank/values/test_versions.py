"""Dictionaries are known to be as they were only if nothing whatever has changed them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.rank.values import versions
from ttprun.rank.values.versions import Versions

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a value replaced": lambda one: one.update(a=2),
    "a value replaced by an equal one": lambda one: one.update(a=float("1")),
    "an item added": lambda one: one.setdefault("b", 1),
    "an item taken away": lambda one: one.pop("a"),
    "emptied": lambda one: one.clear(),
    "two items in another order": lambda one: one.update(a=one.pop("a")),
    "by its last item": lambda one: one.popitem(),
}
pytestmark = pytest.mark.skipif(not versions.ARE_KEPT, reason="this Python keeps no versions")


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str, kind: Any) -> None:
    changed, other = kind(), {"c": 3}
    changed["a"] = 1
    known = Versions([other, changed])

    before = known.are_as_they_were()
    CHANGES[change](changed)
    behind = known.are_as_they_were()
    known.note()

    assert (before, behind, known.are_as_they_were()) == (True, False, True)


def test_an_attribute_that_is_set_is_seen_each_time() -> None:
    held = SimpleNamespace(count=0)
    module = torch.nn.Linear(1, 1)
    found = []

    for count in range(100):
        known = [Versions([vars(one)]) for one in (held, module)]
        found.append([one.are_as_they_were() for one in known])
        held.count = count + 1
        module.count = count  # type: ignore[assignment]
        found.append([one.are_as_they_were() for one in known])

    assert found == [[True, True], [False, False]] * 100


def test_where_no_versions_are_kept_nothing_is_known_to_be_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ARE_KEPT", False)

    assert not Versions([{}]).are_as_they_were()
