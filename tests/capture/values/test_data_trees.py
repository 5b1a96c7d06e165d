"""What the set-up has put into a list or dictionary is data: one digest, until a step changes something in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from tests.capture.user_values import Link
from tests.capture.values.carrying import are_alike, carry, look_at_few, record
from tests.capture.values.test_kept import calls_of
from ttprun.capture import values
from ttprun.capture.records.nodes import DataTreeNode, DictNode, ListNode
from ttprun.capture.values import Restore, Snapshot, changes, data_trees

Scope = dict[str, Any]
ROWS = 1300


@dataclass
class Item:
    """One of the user's."""

    text: str
    numbers: list[int] = field(default_factory=list)
    owner: Any = None


@dataclass(slots=True)
class Row:
    """As `Item`, in slots."""

    text: str
    more: Any = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same, frozen."""

    text: str
    more: Any = None


class Owner:
    """A dataset of the user's, to which its items refer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.items = [Item(str(number), [number], self) for number in range(ROWS)]


@pytest.fixture(autouse=True)
def _few_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    look_at_few(monkeypatch, 64)
    values.forget()
    yield
    values.forget()


def annotations() -> Any:
    """As pycocotools holds them: each row in a list, in an index by number, and in one by image."""
    rows = [{"id": number, "image": number % 50, "box": [1.0, number, 3.0, 4.0]} for number in range(ROWS)]
    by_image: dict[int, list[Any]] = {}
    for row in rows:
        by_image.setdefault(row["image"], []).append(row)
    return {"rows": rows, "by number": {row["id"]: row for row in rows}, "by image": by_image}


def splits() -> Any:
    rows = [(f"{number}.jpg", [number]) for number in range(2 * ROWS)]
    return {"rows": rows, "train": rows[:1000], "validation": rows[1000:]}


MADE: dict[str, Callable[[], Any]] = {
    "columns": lambda: {f"column {number}": [number + 0.5] * 5_000 for number in range(12)},
    "annotations": annotations,
    "splits": splits,
    "documents": lambda: [[Item(str(line), [line]) for line in range(60)] for _ in range(40)],
    "graph": lambda: {number: {(number + step) % ROWS for step in range(1, 9)} for number in range(3 * ROWS)},
    "deep": lambda: {
        f"user {number}": {"items": [1, 2, number], "meta": {"x": (number, [3])}} for number in range(ROWS)
    },
    "rows": lambda: [{"id": number, "text": "x"} for number in range(5_000)],
    "pairs": lambda: [[[number] for number in range(5_000)], [(f"{number}.jpg", number) for number in range(5_000)]],
    "objects": lambda: {"items": [Link(number, None) for number in range(5_000)]},
    "slots": lambda: [Row(str(number), [Row("x", number)]) for number in range(ROWS)],
    "frozen": lambda: [Fixed(str(number), [Row("x", number)]) for number in range(ROWS)],
    "tensors in objects": lambda: [[Item("x", [1], torch.full((40,), float(number)))] for number in range(ROWS)],
    "arrays by name": lambda: {f"a{number}": {"x": numpy.full(40, number)} for number in range(ROWS)},
}
# A change of one thing in each, deep inside.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "columns": lambda data: data["column 7"].__setitem__(4_000, -1.0),
    "annotations": lambda data: data["rows"][1100]["box"].__setitem__(0, -1.0),
    "splits": lambda data: data["train"][900][1].append(-1),
    "documents": lambda data: data[30][50].numbers.append(-1),
    "graph": lambda data: data.__setitem__(2000, {1}),
    "deep": lambda data: data["user 800"]["meta"]["x"][1].append(-1),
    "rows": lambda data: data[4_500].__setitem__("text", "y"),
    "pairs": lambda data: data[0][4_500].append(-1),
    "objects": lambda data: setattr(data["items"][4_500], "next", -1),
    "slots": lambda data: setattr(data[1_200].more[0], "text", "y"),
    "frozen": lambda data: setattr(data[1_200].more[0], "text", "y"),
    "tensors in objects": lambda data: data[800][0].owner.fill_(-1.0),
    "arrays by name": lambda data: data["a800"]["x"].fill(-1),
}


def plain(data: Any) -> Any:
    """The same in what can be compared."""
    if isinstance(data, torch.Tensor | numpy.ndarray):
        return data.tolist()
    if isinstance(data, Row | Fixed):
        return [data.text, plain(data.more)]
    if isinstance(data, Item | Link):
        return plain(vars(data))
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [plain(item) for item in data] if isinstance(data, list | tuple) else data


def nodes_of(scope: Scope) -> dict[str, Any]:
    """Of the next boundary."""
    values.begin_boundary()
    return dict(record(scope, key="trees")[0])


def is_small(kind: str) -> bool:
    """Whether all of it is recorded beside the digest."""
    return kind not in ("rows", "pairs", "objects", "tensors in objects", "arrays by name")


@pytest.mark.parametrize("kind", MADE)
def test_data_that_never_changes_takes_a_digest_and_few_calls(kind: str) -> None:
    data = MADE[kind]()
    nodes, counts = [], []
    for _ in range(8):
        values.begin_boundary()
        walk = Snapshot({})
        counts.append(calls_of(lambda walk=walk: nodes.append(walk.node(data, 0))))  # type: ignore[misc]

    assert {type(node) for node in nodes} == {DataTreeNode}
    assert len({node.digest for node in nodes}) == 1
    assert counts[-1] < 1_500 < counts[0]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("boundary", [1, 8])
def test_a_change_is_found_within_a_round_and_comes_to_the_replacement(kind: str, boundary: int) -> None:
    data = MADE[kind]()
    for _ in range(boundary):
        assert type(nodes_of({"data": data})["data"]) is DataTreeNode

    CHANGES[kind](data)
    for _ in range(100):
        node = nodes_of({"data": data})["data"]
        if type(node) is not DataTreeNode:
            break
        assert boundary == 8
        assert 0 < node.age < 100  # what is not seen yet is named
    else:
        pytest.fail("the change was never seen")

    here = {"data": MADE[kind]()}
    assert carry({"data": data}, here) == []
    assert plain(here["data"]) == plain(data)


@pytest.mark.parametrize("kind", MADE)
def test_the_replays_own_data_stays_and_what_refers_into_it_does_so_again(kind: str) -> None:
    def inner(data: Any) -> Any:
        first = next(iter(data.values())) if isinstance(data, dict) else data[0]
        if kind in ("splits", "frozen"):  # tuples and what is frozen are values
            return first[0][1] if kind == "splits" else first.more[0]
        return first[0] if isinstance(first, list) and kind != "columns" else first

    data, own = MADE[kind](), MADE[kind]()
    here: Scope = {"data": own, "again": None, "current": None}

    assert carry({"data": data, "again": data, "current": inner(data)}, here) == []

    assert here["data"] is own
    assert here["again"] is own
    assert here["current"] is inner(own)


@pytest.mark.parametrize("kind", MADE)
def test_other_data_in_the_replay_is_written_over_if_it_is_small_else_named(kind: str) -> None:
    lost, own = MADE[kind](), MADE[kind]()
    CHANGES[kind](own)
    here = {"data": own}

    doubts = carry({"data": lost}, here)

    if is_small(kind):
        assert doubts == []
        assert here["data"] is own
        assert plain(here["data"]) == plain(lost)
        assert are_alike(record({"data": lost}), record(here))
    else:
        assert doubts == ["data is data that differs from the lost rank's"]


@pytest.mark.parametrize("live", [None, "MISSING", (), [1]])
def test_small_data_that_the_replay_has_not_made_is_made(live: Any) -> None:
    here: Scope = {} if live == "MISSING" else {"data": live}
    lost = {"data": annotations()}

    assert carry(lost, here) == []

    assert here["data"] == lost["data"]
    assert here["data"]["by number"][3] is here["data"]["rows"][3]


def test_rows_shared_by_several_lists_are_data_in_each_and_the_same_rows_again() -> None:
    def scope() -> Scope:
        rows = [(f"{number}.jpg", [number]) for number in range(3 * ROWS)]
        copy = [*rows]
        index = {number: row[1] for number, row in enumerate(rows)}
        return {"rows": rows, "copy": copy, "index": index}

    lost, here = scope(), scope()
    for _ in range(5):
        nodes = nodes_of(lost)
        assert [type(nodes[name]) for name in ("rows", "copy", "index")] == [DataTreeNode] * 3
    assert len(nodes["index"].outside) == 1  # of the rows' lists, only their tree

    assert carry(lost, here) == []
    assert here["index"][5] is here["rows"][5][1]

    lost["rows"][5][1].append(-1)
    for _ in range(100):
        nodes = nodes_of(lost)
    assert not any(type(nodes[name]) is DataTreeNode for name in lost)
    here = scope()
    assert carry(lost, here) == []
    assert here["index"][5] is here["rows"][5][1]
    assert here["index"][5] == [5, -1]


def test_items_that_refer_to_what_holds_them_are_data_while_the_holder_changes() -> None:
    lost, here = {"owner": Owner()}, {"owner": Owner()}
    for epoch in range(6):
        lost["owner"].epoch = epoch
        node = nodes_of(lost)["owner"]
        assert type(node.attributes["items"]) is DataTreeNode

    assert carry(lost, here) == []
    assert here["owner"].epoch == 5
    assert here["owner"].items[3].owner is here["owner"]


def test_what_is_left_of_changed_data_is_data_still() -> None:
    def made() -> Any:
        return {
            "step": 0,
            "train": [[number, "x"] for number in range(3 * ROWS)],
            "bank": [[number, "y"] for number in range(3 * ROWS)],
        }

    data = made()
    for _ in range(4):
        assert type(nodes_of({"data": data})["data"]) is DataTreeNode
    data["step"] = 1
    data["bank"][7].append(1)

    for _ in range(3):
        node = nodes_of({"data": data})["data"]
    assert type(node) is DictNode
    assert [type(item) for item in node.values] == [int, DataTreeNode, ListNode]
    here = {"data": made()}
    train = here["data"]["train"]
    assert carry({"data": data}, here) == []
    assert here["data"] == data
    assert here["data"]["train"] is train


def test_what_was_added_to_data_is_no_data() -> None:
    data = {"rows": [[number] for number in range(3 * ROWS)], "made": None}
    nodes_of({"data": data})
    data["made"] = [[-number] for number in range(3 * ROWS)]

    for _ in range(3):
        node = nodes_of({"data": data})["data"]

    assert [type(item) for item in node.values] == [DataTreeNode, ListNode]


def test_what_a_step_makes_is_no_data() -> None:
    nodes_of({"data": None})
    nodes_of({"data": None})

    assert not isinstance(nodes_of({"data": MADE["documents"]()})["data"], DataTreeNode)


@pytest.mark.parametrize("kind", MADE)
def test_data_that_was_restored_as_changed_is_recorded_so_by_the_replacement(kind: str) -> None:
    lost = {"data": MADE[kind]()}
    nodes_of(lost)
    CHANGES[kind](lost["data"])
    assert type(nodes_of(lost)["data"]) is not DataTreeNode
    here = {"data": MADE[kind]()}
    assert carry(lost, here) == []

    changes.Clock.records = 0  # as in the replacement
    recorded = nodes_of(here)["data"]

    second = {"data": MADE[kind]()}
    assert carry(here, second) == []
    assert plain(second) == plain(lost)
    assert type(recorded) is not DataTreeNode or recorded.packed


@pytest.mark.parametrize(
    "inner",
    [iter([]), open, torch.zeros(3, requires_grad=True), torch.nn.Linear(1, 1), torch.Generator()],
    ids=["an iterator", "a function", "a weight", "a module", "a generator"],
)
def test_what_holds_something_else_is_walked_over_and_the_rest_of_it_is_data(inner: Any) -> None:
    data = {"inner": inner, "rows": [[number] for number in range(3 * ROWS)]}

    node = nodes_of({"data": data})["data"]

    assert isinstance(node, DictNode | DataTreeNode)
    if isinstance(node, DictNode):
        assert type(node.values[1]) is DataTreeNode


def test_a_large_array_in_data_is_recorded_once_it_has_changed() -> None:
    def made() -> Any:
        return [numpy.full(20_000, float(number)) for number in range(300)]

    data = made()
    for _ in range(5):
        assert type(nodes_of({"data": data})["data"]) is DataTreeNode
    data[7][3] = -1.0
    for _ in range(320):
        if type(nodes_of({"data": data})["data"]) is not DataTreeNode:
            break

    here = {"data": made()}
    assert carry({"data": data}, here) == []
    assert here["data"][7][3] == -1.0


def test_where_something_in_it_is_met_before_it_all_is_recorded_at_this_boundary_alone() -> None:
    data = {"rows": [[number] for number in range(3 * ROWS)]}
    for _ in range(4):
        nodes_of({"x": None, "data": data})

    lost: Scope = {"x": data["rows"][5], "data": data}
    node = nodes_of(lost)["data"]
    assert not isinstance(node, DataTreeNode)
    here: Scope = {"x": None, "data": {"rows": [[number] for number in range(3 * ROWS)]}}
    assert carry(lost, here) == []
    assert here["x"] is here["data"]["rows"][5]

    assert type(nodes_of({"x": None, "data": data})["data"]) is DataTreeNode


def test_there_are_only_so_many_trees() -> None:
    data = [[[number] for number in range(3 * ROWS)] for _ in range(data_trees.MOST_TREES + 5)]
    scope = {f"data {number}": rows for number, rows in enumerate(data)}

    kinds = [type(node) for name, node in nodes_of(scope).items() if name]

    assert kinds.count(DataTreeNode) == data_trees.MOST_TREES


def test_a_replacement_names_what_was_not_seen_whole_at_the_boundary() -> None:
    scope = {"data": annotations()}
    for _ in range(8):
        node = nodes_of(scope)["data"]
    restore = Restore([], is_comparing=True)
    restore.module({"data": annotations()}, {"data": node}, "")
    assert restore.named == [f"data had never changed, and was last seen whole {node.age} steps before"]

    changes.Clock.is_whole = True
    try:
        assert nodes_of(scope)["data"].age == 0
    finally:
        changes.Clock.is_whole = False


def test_only_so_much_is_recorded_beside_the_digests_of_all_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"data {number}": [[number] for number in range(3 * ROWS)] for number in range(3)}
    size = len(nodes_of(made)["data 0"].packed)
    values.forget()
    monkeypatch.setattr(data_trees, "SMALL_TREE_BYTES", 2 * size)

    nodes = nodes_of(made)

    assert [bool(nodes[name].packed) for name in made] == [True, True, False]
