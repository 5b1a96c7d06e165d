"""Very many rows that have never changed are looked at in turns, and a record says how long ago each was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rank.values.carrying import record
from tests.rank.values.test_kept import calls_of
from ttprun.capture import values
from ttprun.capture.records.nodes import ListNode
from ttprun.capture.records.packing import listed
from ttprun.capture.values import Restore, Snapshot, long_items, unchanged

NOTHING: dict[int, int] = {}
ROWS = 640
ROUND = 10  # boundaries until each has had its turn


@pytest.fixture(autouse=True)
def _few_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unchanged, "_TURNS", (64, 64, 64))
    yield
    unchanged.Clock.is_whole = False
    values.forget()


MADE: dict[str, Callable[[], list[Any]]] = {
    "long lists": lambda: [[number, *range(100)] for number in range(ROWS)],
    "short lists": lambda: [[number, 1.5] for number in range(ROWS)],
    "dictionaries": lambda: [{"id": number, "text": "x"} for number in range(ROWS)],
}


def set_item(row: Any) -> None:
    row[0 if isinstance(row, list) else "id"] = -1


def node_of(rows: Any) -> ListNode:
    """Of the next boundary."""
    values.begin_boundary()
    found = record({"rows": rows}, key="turns")[0]["rows"]
    assert isinstance(found, ListNode)
    return found


@pytest.mark.parametrize("kind", MADE)
def test_a_boundary_looks_at_as_many_rows_as_its_budget_allows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = unchanged.Unchanged._look
    monkeypatch.setattr(unchanged.Unchanged, "_look", lambda self: (looked.append(1), look(self))[1])
    rows = MADE[kind]()
    counts = []
    for _ in range(20):
        values.begin_boundary()
        walk = Snapshot(NOTHING)
        counts.append(calls_of(lambda walk=walk: walk.node(rows, 0)))  # type: ignore[misc]

    assert len(looked) == 16  # the others were whole
    assert counts[-1] < counts[0] / 4
    assert counts[-1] < 64 * 15


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("at", [0, 63, 64, 320, ROWS - 1])
def test_a_change_of_any_row_is_recorded_within_one_round(kind: str, at: int) -> None:
    rows = MADE[kind]()
    for _ in range(8):
        node_of(rows)

    set_item(rows[at])
    ages = []
    for _ in range(ROUND + 1):
        node = node_of(rows)
        ages.append(node.age)
        row = listed(node.items)[at]
        is_seen = -1 in (listed(row.items) if isinstance(row, ListNode) else listed(row.values))
        assert is_seen or 0 < node.age <= ROUND  # what is not seen yet is named
    assert is_seen
    assert node.age == 0


@pytest.mark.parametrize("kind", MADE)
def test_a_row_that_is_longer_another_one_or_added_is_recorded_at_once(kind: str) -> None:
    for change in (
        lambda rows: rows.append(rows[0]), lambda rows: rows.__setitem__(5, rows[4]), lambda rows: rows.reverse(),
        lambda rows: rows[5].append(7) if isinstance(rows[5], list) else rows.pop(),
    ):  # fmt: skip
        rows = MADE[kind]()
        for _ in range(8):
            node_of(rows)
        change(rows)
        node = node_of(rows)
        fresh = record({"rows": rows})[0]["rows"]
        assert len(listed(node.items)) == len(listed(fresh.items))
        assert values.pack(listed(node.items)[5:7])[-40:] == values.pack(listed(fresh.items)[5:7])[-40:]


def test_where_a_record_is_needed_for_more_all_are_looked_at() -> None:
    rows = MADE["dictionaries"]()
    for _ in range(8):
        node_of(rows)
    set_item(rows[ROWS - 1])

    unchanged.Clock.is_whole = True

    assert node_of(rows).age == 0
    assert listed(listed(node_of(rows).items)[-1].values)[0] == -1


def test_a_comparison_with_the_lost_rank_looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_items, "MAX_ITEMS", 100)
    monkeypatch.setattr("ttprun.capture.values.containers.MAX_ITEMS", 100)
    rows = MADE["dictionaries"]()
    for _ in range(8):
        values.begin_boundary()
        node = Snapshot(NOTHING).node(rows, 0)
    set_item(rows[ROWS - 1])

    restore = Restore([], is_comparing=True, is_strict=False)
    restore.module({"rows": rows}, {"rows": node}, "")

    assert restore.doubts == ["rows is a long container with other items"]


def test_a_replacement_names_what_was_not_seen_whole_at_the_boundary() -> None:
    rows = MADE["dictionaries"]()
    for _ in range(8):
        node = node_of(rows)
    restore = Restore([], is_comparing=True)

    restore.module({"rows": MADE["dictionaries"]()}, {"rows": node}, "")

    assert restore.named == ["rows had never changed, and was last seen whole 4 steps before"]
