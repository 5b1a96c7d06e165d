"""Long lists of dictionaries and lists: a data set as a file of JSON gives it."""

from __future__ import annotations

import copy
import json
import random
import statistics
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.capture.user_values import Meter, Stage, count_up
from tests.capture.values.carrying import Scope, carry, is_refused
from ttprun.capture import values
from ttprun.capture.values import Snapshot, containers, long_items
from ttprun.capture.values.long_items import MIN_ITEMS, WALKS, kept_items


def make_rows(count: int = 40) -> list[Any]:
    made: list[Any] = json.loads(
        json.dumps(
            [{"q": f"question {n}", "n": n, "turns": [{"role": "user", "ids": [n, n + 1]}]} for n in range(count)]
        )
    )
    return made


@pytest.fixture
def are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty rows are too many to be recorded."""
    for module in (containers, long_items):
        monkeypatch.setattr(module, "MAX_ITEMS", 30)


def replace_row(rows: Any) -> None:
    rows[7] = dict(rows[7], n=-1)


def set_value(rows: Any) -> None:
    rows[7]["n"] = 10**9


def set_deep_value(rows: Any) -> None:
    rows[7]["turns"][0]["ids"][1] = 10**9


def move_over_a_border(rows: Any) -> None:
    """Laid out flat, nothing has changed."""
    rows[4]["turns"][0]["ids"][2:] = rows[5]["turns"][0]["ids"][:1]
    del rows[5]["turns"][0]["ids"][:1]


def order_keys_anew(rows: Any) -> None:
    rows[7]["q"] = rows[7].pop("q")


def append(rows: Any) -> None:
    rows.append({"q": "new", "n": 41, "turns": []})


def append_deep(rows: Any) -> None:
    rows[-1]["turns"].append({"role": "system"})


def add_object(rows: Any) -> None:
    rows[3]["meter"] = Meter()


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (
        replace_row, set_value, set_deep_value, move_over_a_border, order_keys_anew, append, append_deep,
        random.shuffle, list.reverse, list.pop, list.clear,
    )
}  # fmt: skip


def carried(rows: Any, here: Any) -> Any:
    """What the replacement has at the next boundary."""
    values.begin_boundary()
    scope = {"rows": here}
    carry({"rows": rows}, scope)
    assert scope["rows"] is here
    return here


@pytest.mark.parametrize("kind", CHANGES)
def test_rows_that_change_between_two_boundaries_come_back_as_they_are(kind: str) -> None:
    rows = make_rows()
    assert carried(rows, make_rows()) == rows

    CHANGES[kind](rows)

    for _ in range(WALKS + 3):
        assert repr(carried(rows, make_rows())) == repr(rows)


def test_a_dictionary_of_rows_comes_back() -> None:
    lost = {row["n"]: row for row in make_rows()}
    values.begin_boundary()
    here: Scope = {"table": {}}
    carry({"table": lost}, here)
    set_deep_value(list(lost.values()))

    carry({"table": lost}, here)

    assert here["table"] == lost


def test_rows_with_an_object_of_the_scripts_own_among_them_come_back() -> None:
    rows, here = make_rows(), make_rows()
    carried(rows, here)
    add_object(rows)
    add_object(here)
    rows[3]["meter"].update(2.5)

    carried(rows, here)

    assert here[3]["meter"].total == 2.5


@pytest.mark.parametrize("is_first", [True, False])
def test_the_row_at_which_the_script_stands_is_the_one_in_the_rows(is_first: bool) -> None:
    """A variable for a row may come before the one for all."""
    rows, here = make_rows(), make_rows()
    names = ("row", "rows", "turns") if is_first else ("rows", "row", "turns")
    lost: Scope = {name: {"row": rows[5], "rows": rows, "turns": rows[6]["turns"]}[name] for name in names}
    scope: Scope = {name: {"row": here[2], "rows": here, "turns": here[2]["turns"]}[name] for name in names}
    values.begin_boundary()
    carry({"rows": rows}, {"rows": make_rows()})

    carry(lost, scope)

    assert scope["row"] is scope["rows"][5]
    assert scope["turns"] is scope["rows"][6]["turns"]
    assert scope["rows"] == rows


@pytest.mark.usefixtures("are_long")
def test_the_row_at_which_the_script_stands_is_the_one_in_a_long_list_or_refused() -> None:
    rows, here = make_rows(), make_rows()
    scope: Scope = {"rows": here, "row": here[2]}

    carry({"rows": rows, "row": rows[5]}, scope)

    assert scope["row"] is here[5]
    assert here == rows
    assert is_refused({"row": rows[5], "rows": rows}, {"row": here[2], "rows": here})


def test_rows_that_hold_the_list_in_which_they_are_come_back() -> None:
    rows, here = make_rows(), make_rows()
    rows[3]["all"] = rows
    rows.append(rows)

    carried(rows, here)

    assert here[3]["all"] is here[-1] is here


@pytest.mark.usefixtures("are_long")
def test_a_long_list_of_rows_that_the_replay_has_made_again_is_left_as_it_is() -> None:
    here = make_rows()
    scope = {"rows": here, "step": 0}

    mismatches = carry({"rows": make_rows(), "step": 3}, scope)

    assert mismatches == []
    assert scope == {"rows": here, "step": 3}


@pytest.mark.usefixtures("are_long")
def test_a_long_list_of_rows_in_which_one_has_changed_is_a_mismatch() -> None:
    rows, here = make_rows(), make_rows()
    carry({"rows": rows}, {"rows": here})
    values.begin_boundary()
    set_value(rows)

    assert carry({"rows": rows}, {"rows": here}) == ["rows is a long container with other items"]


def test_rows_are_packed_once_as_long_as_nothing_has_changed() -> None:
    rows = make_rows()
    first = kept_items(Snapshot({}), rows, rows)
    assert first is not None
    packed = bytes(first.packed)

    values.begin_boundary()
    again = kept_items(Snapshot({}), rows, rows)

    assert again is first
    assert again.packed == packed


def test_rows_that_are_added_one_by_one_are_packed_alone_and_come_back() -> None:
    history, here = make_rows(), make_rows()
    packed = b""

    for number in range(5):
        assert carried(history, here) == history
        kept = kept_items(Snapshot({}), history, history)
        assert kept is not None
        assert kept.packed.startswith(packed)
        packed = bytes(kept.packed)
        history.append({"epoch": number, "first": history[number], "losses": [0.5, number]})

    carried(history, here)
    assert here == history
    assert here[-1]["first"] is here[4]


def test_equal_rows_in_two_processes_are_reported_alike_however_many_others_there_are() -> None:
    """A batch's fingerprint is compared with that of another process."""
    one = values.pack(Snapshot({}, is_separate=True).node({"rows": make_rows()}, 0))
    carried(make_rows(50), make_rows(50))

    other = values.pack(Snapshot({}, is_separate=True).node({"rows": copy.deepcopy(make_rows())}, 0))

    assert one == other


@pytest.mark.parametrize("are_few", [True, False])
def test_rows_in_two_long_lists_are_the_same_objects_in_both(are_few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_items, "MANY_ROWS", 4096 if are_few else 16)
    rows, others = make_rows(), make_rows()
    lost: Scope = {"rows": rows, "others": others, "row": rows[7], "shuffled": rows[::-1], "other": others[3]["turns"]}
    here: Scope = {"rows": make_rows(), "others": make_rows(), "row": None, "shuffled": [], "other": None}

    for _ in range(3):
        values.begin_boundary()
        carry(lost, here)

    assert here["row"] is here["rows"][7]
    assert here["shuffled"][0] is here["rows"][-1]
    assert here["other"] is here["others"][3]["turns"]
    assert here["others"] == others


def test_a_long_dictionary_of_library_functions_and_a_list_of_paths_are_walked_over_once() -> None:
    functions = {name: getattr(statistics, name) for name in statistics.__all__ if name.islower()}
    paths = [PurePosixPath(f"{number}.png") for number in range(40)]
    stages = dict.fromkeys(range(40), Stage.WARM_UP)

    for held in (functions, paths, stages):
        values.begin_boundary()
        items: Any = held if isinstance(held, list) else held.values()
        assert kept_items(Snapshot({}), held, items, which=1) is not None


def test_many_functions_of_the_script_are_looked_at_each_time_since_they_may_be_given_attributes() -> None:
    values.begin_boundary()

    assert kept_items(Snapshot({}), functions := [count_up] * 20, functions) is None


@pytest.mark.parametrize("beside", [1 << 100, "\ud800"], ids=["an integer over 64 bits", "a lone surrogate"])
def test_a_long_list_is_restored_beside_what_is_packed_in_another_way(beside: Any) -> None:
    losses = [0.5 * n for n in range(MIN_ITEMS + 1)]
    here: Scope = {"losses": [0.0], "beside": 0}

    carry({"losses": losses, "beside": beside}, here)

    assert here == {"losses": losses, "beside": beside}
