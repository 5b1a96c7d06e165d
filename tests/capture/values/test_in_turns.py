"""Very many rows that have never changed are looked at in turns, and a record says how long ago each was seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.capture.user_values import Link
from tests.capture.values.carrying import are_alike, look_at_few, record
from tests.capture.values.test_kept import calls_of
from ttprun.capture import values
from ttprun.capture.records.nodes import ListNode
from ttprun.capture.records.packing import listed
from ttprun.capture.values import Restore, Snapshot, changes, data_trees, long_items

NOTHING: dict[int, int] = {}
ROWS = 640
ROUND = 10  # boundaries until each has had its turn


@pytest.fixture(autouse=True)
def _few_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    look_at_few(monkeypatch, 64)
    monkeypatch.setattr(data_trees, "MANY", 1 << 40)  # they are rows of a list, and no data
    yield
    changes.Clock.is_whole = False
    values.forget()


MADE: dict[str, Callable[[], list[Any]]] = {
    "long lists": lambda: [[number, *range(100)] for number in range(ROWS)],
    "short lists": lambda: [[number, 1.5] for number in range(ROWS)],
    "objects": lambda: [Link(number, [1]) for number in range(ROWS)],
    "dictionaries": lambda: [{"id": number, "text": "x"} for number in range(ROWS)],
}


def set_item(row: Any) -> None:
    if isinstance(row, Link):
        row.number = -1
    else:
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
    look = changes.Piece._look
    monkeypatch.setattr(changes.Piece, "_look", lambda self, *of: (looked.append(1), look(self, *of))[1])
    rows = MADE[kind]()
    counts = []
    for _ in range(20):
        values.begin_boundary()
        walk = Snapshot(NOTHING)
        counts.append(calls_of(lambda walk=walk: walk.node(rows, 0)))  # type: ignore[misc]

    assert len(looked) >= 15  # the others were whole
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
        is_seen = b"\xff" in values.pack(row)
        assert is_seen or 0 < node.age <= ROUND  # what is not seen yet is named
    assert is_seen
    assert node.age == 0


@pytest.mark.parametrize("kind", MADE)
def test_a_row_that_is_longer_another_one_or_added_is_recorded_at_once(kind: str) -> None:
    for change in (
        lambda rows: rows.append(rows[0]), lambda rows: rows.__setitem__(5, rows[4]), lambda rows: rows.reverse(),
        lambda rows: rows[5].append(7) if isinstance(rows[5], list) else rows.pop(),
        lambda rows: rows.__setitem__(slice(0, 2), rows[1::-1]),
    ):  # fmt: skip
        rows = MADE[kind]()
        for _ in range(8):
            node_of(rows)
        change(rows)
        values.begin_boundary()
        found = record({"rows": rows}, key="turns")
        values.forget()
        assert are_alike(found, record({"rows": rows}))


def test_where_a_record_is_needed_for_more_all_are_looked_at() -> None:
    rows = MADE["dictionaries"]()
    for _ in range(8):
        node_of(rows)
    set_item(rows[ROWS - 1])

    changes.Clock.is_whole = True

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

    assert [*map(str, restore.doubts)] == ["rows is a long container with other items"]


def test_a_replacement_names_what_was_not_seen_whole_at_the_boundary() -> None:
    rows = MADE["dictionaries"]()
    for _ in range(8):
        node = node_of(rows)
    restore = Restore([], is_comparing=True)

    restore.module({"rows": MADE["dictionaries"]()}, {"rows": node}, "")

    assert restore.named == ["rows had never changed, and was last seen whole 4 steps before"]


@pytest.mark.parametrize("change", [lambda one: one.add("new"), lambda one: one.discard("7"), set.clear])
def test_a_change_of_a_large_sets_length_is_recorded_at_once(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_items, "_MOST", {True: 16, False: 16})
    words = set(map(str, range(200)))
    for _ in range(8):
        values.begin_boundary()
        record({"words": words}, key="turns")

    change(words)
    values.begin_boundary()
    here: dict[str, Any] = {"words": set()}
    Restore([], is_comparing=False).module(here, record({"words": words}, key="turns")[0], "")

    assert here["words"] == words


@pytest.mark.parametrize("kind", [list, deque, set])
def test_another_item_in_a_large_container_is_recorded_within_one_round(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_items, "_MOST", {True: 100, False: 16})
    held = kind(map(str, range(5000)))
    for _ in range(8):
        values.begin_boundary()
        record({"held": held}, key="turns")

    if kind is set:
        held.remove("150")
        held.add("new")
    else:
        held[150] = "new"
    seen = []
    for _ in range(64):
        values.begin_boundary()
        (node,) = record({"held": held}, key="turns")[0].values()
        seen.append("new" in listed(node.items))
        assert seen[-1] or node.age > 0

    assert seen[-1]


def test_many_things_share_the_time_of_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = changes.Piece._look
    monkeypatch.setattr(changes.Piece, "_look", lambda self, *of: (looked.append(1), look(self, *of))[1])
    things = 5 * changes.PARTS
    scope = {f"rows{number}": MADE["dictionaries"]() for number in range(things)}

    def nodes() -> dict[str, Any]:
        values.begin_boundary()
        return record(scope, key="many")[0]

    for _ in range(8):
        nodes()
    looks = []
    for _ in range(2 * things):
        looked.clear()
        nodes()
        looks.append(len(looked))
    assert set(looks) == {changes.PARTS}

    set_item(scope["rows7"][ROWS - 1])
    ages = []
    for _ in range(5 * ROUND):
        node = nodes()["rows7"]
        if listed(listed(node.items)[-1].values)[0] == -1:
            break
        ages.append(node.age)
    else:
        pytest.fail("the change was never recorded")
    assert all(0 < age <= 5 * ROUND for age in ages)  # one of five boundaries is its turn


def test_parts_that_are_added_step_by_step_do_not_begin_a_round_again() -> None:
    turn = changes.Turns()
    looked = []
    for boundary in range(changes.LOOKS + 8):
        changes.Clock.advance()
        due = turn.due(4 + boundary // 2)
        turn.note(due, True)
        looked.append(due)

    assert looked == [changes.ALL] * changes.LOOKS + list(range(8))
    assert turn.age == 7  # of the first part


def test_things_that_are_added_one_by_one_are_in_the_same_parts_as_if_they_had_been_there_before() -> None:
    lists = [[0] * 3] * 300 + [[0] * (1 << 17)] + [[0] * 5] * 77
    at_once, bit_by_bit = changes.Tracker(changes.LONG_LISTS), changes.Tracker(changes.LONG_LISTS)
    at_once.add(lists)
    for items in lists:
        bit_by_bit.add([items])
        bit_by_bit.count_parts()

    parts = [at_once.part(number) for number in range(at_once.count_parts())]
    assert [bit_by_bit.part(number) for number in range(bit_by_bit.count_parts())] == parts
    assert [at for part in parts for at in range(*part)] == list(range(len(lists)))
