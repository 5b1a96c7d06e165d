"""Samples in a list or dictionary: compared like one large array as long as none has changed, then recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from tests.capture.values.carrying import are_alike, carry, look_at_few, record
from tests.capture.values.test_kept import calls_of
from ttprun.capture import values
from ttprun.capture.records.nodes import ChangedDataNode, DataTreeNode, DictNode, ListNode
from ttprun.capture.values import Snapshot, large

ROWS = 640
ROUND = 10  # boundaries until each has had its turn
Scope = dict[str, Any]


@dataclass
class Sample:
    """One of the user's."""

    image: Any
    label: int


@pytest.fixture(autouse=True)
def _few_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    look_at_few(monkeypatch, ROWS // ROUND)
    values.forget()
    yield
    values.forget()


def tensor(number: int) -> torch.Tensor:
    return torch.full((8, 8), float(number))


def array(number: int) -> Any:
    return numpy.full((8, 8), float(number))


MADE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [tensor(number) for number in range(ROWS)],
    "arrays": lambda: [array(number) for number in range(ROWS)],
    "pairs": lambda: [(tensor(number), number % 10) for number in range(ROWS)],
    "dictionaries": lambda: [{"x": array(number), "y": number} for number in range(ROWS)],
    "objects": lambda: [Sample(tensor(number), number) for number in range(ROWS)],
    "by number": lambda: {number: tensor(number) for number in range(ROWS)},
    "by name": lambda: {f"a{number}": (array(number), 1) for number in range(ROWS)},
    "views": lambda: list(torch.arange(ROWS * 64.0).view(ROWS, 8, 8)),
}


def element(rows: Any, at: int) -> Any:
    """The tensor or array of a row."""
    row = list(rows.values())[at] if isinstance(rows, dict) else rows[at]
    row = row["x"] if isinstance(row, dict) else row.image if isinstance(row, Sample) else row
    return row[0] if isinstance(row, tuple) else row


def node_of(rows: Any) -> Any:
    """Of the next boundary."""
    values.begin_boundary()
    return record({"rows": rows}, key="data")[0]["rows"]


@pytest.mark.parametrize("kind", MADE)
def test_samples_that_never_change_take_a_digest_and_few_calls(kind: str) -> None:
    rows = MADE[kind]()
    nodes, counts = [], []
    for _ in range(8):
        values.begin_boundary()
        walk = Snapshot({})
        counts.append(calls_of(lambda walk=walk: nodes.append(walk.node(rows, 0))))  # type: ignore[misc]

    assert {type(node) for node in nodes} == {DataTreeNode}
    assert len({node.digest for node in nodes}) == 1
    assert counts[-1] < ROWS // ROUND * 12 + 100


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("at", [0, ROWS // ROUND, ROWS - 1])
@pytest.mark.parametrize("boundary", [1, 8])
def test_a_written_sample_is_found_within_a_round_and_all_are_recorded_from_then_on(
    kind: str, at: int, boundary: int
) -> None:
    rows = MADE[kind]()
    for _ in range(boundary):
        node_of(rows)

    element(rows, at)[0] = -1.0
    found = []
    for _ in range(ROUND + 1):
        node = node_of(rows)
        found.append(node)
        assert type(node) is not DataTreeNode or 0 < node.age <= ROUND  # what is not seen yet is named

    assert type(found[-1]) in (ListNode, DictNode)
    assert type(found[0]) is not DataTreeNode or boundary == 8
    here = {"rows": MADE[kind]()}
    assert carry({"rows": rows}, here) == []
    assert element(here["rows"], at)[0].max() == -1.0


@pytest.mark.parametrize("kind", ["pairs", "by number"])
def test_added_and_exchanged_samples_are_seen_at_once(kind: str) -> None:
    rows = MADE[kind]()
    for _ in range(8):
        node_of(rows)

    if isinstance(rows, dict):
        rows[ROWS] = tensor(5)
    else:
        rows[7] = (tensor(-1), 3)

    assert type(node_of(rows)) is not DataTreeNode
    here = {"rows": MADE[kind]()}
    assert carry({"rows": rows}, here) == []
    assert are_alike(record({"rows": rows}), record(here))


@pytest.mark.parametrize("kind", MADE)
def test_the_replays_own_samples_stay_and_what_refers_to_them_refers_to_them_again(kind: str) -> None:
    rows, own = MADE[kind](), MADE[kind]()
    here: Scope = {"rows": own, "again": None, "current": None}

    assert carry({"rows": rows, "again": rows, "current": element(rows, 70)}, here) == []

    assert here["rows"] is own
    assert here["again"] is own
    assert here["current"] is element(own, 70)


@pytest.mark.parametrize("kind", MADE)
def test_other_samples_in_the_replay_are_named(kind: str) -> None:
    own = MADE[kind]()
    element(own, 600)[3] += 1

    assert carry({"rows": MADE[kind]()}, {"rows": own}) == ["rows is data that differs from the lost rank's"]


def test_a_part_of_a_sample_that_is_a_sample_too_hides_nothing_of_it() -> None:
    def scope(at: int) -> Scope:
        rows = [array(number) for number in range(ROWS)]
        rows.append(rows[70][3:4])
        return {"rows": rows, "x": torch.as_tensor(rows[at][4:])}

    lost, here = scope(70), scope(9)
    assert carry(lost, here) == []

    here["x"][...] = -5.0
    assert here["rows"][70].min() == -5.0
    assert here["rows"][9].min() == 9.0


def test_a_sample_that_gets_gradients_is_recorded_with_its_flag() -> None:
    rows = MADE["tensors"]()
    for _ in range(3):
        node_of(rows)

    rows[5].requires_grad_(True)

    assert type(node_of(rows)) is ListNode
    here = {"rows": MADE["tensors"]()}
    assert carry({"rows": rows}, here) == []
    assert here["rows"][5].requires_grad


SHARED: dict[str, Callable[[Any], Any]] = {
    "a view": lambda element: element[0],
    "the same memory": lambda element: element.detach() if isinstance(element, torch.Tensor) else element.view(),
    "as a tensor": lambda element: torch.as_tensor(element).view(-1),
    "a part as a tensor": lambda element: torch.as_tensor(element[3:]),
    "as an array": lambda element: numpy.asarray(element)[2],
}


# Not: a tensor in the memory of an array that is met after it, in a list or alone: it is written there.
MEETINGS = [
    pytest.param(kind, how, is_before, id=f"{how} of {kind}, met {'before' if is_before else 'after'} them")
    for kind in ("tensors", "arrays", "pairs", "by name")
    for how in SHARED
    for is_before in (False, True)
    if not (is_before and kind in ("arrays", "by name") and "tensor" in how)
]


@pytest.mark.parametrize(("kind", "how", "is_before"), MEETINGS)
def test_what_shares_memory_with_a_sample_shares_it_again_and_no_sample_is_written(
    kind: str, how: str, is_before: bool
) -> None:
    def scope(at: int) -> Scope:
        rows = MADE[kind]()
        x = SHARED[how](element(rows, at))
        return {"x": x, "rows": rows} if is_before else {"rows": rows, "x": x}

    lost, here = scope(70), scope(9)
    kept = MADE[kind]()

    assert carry(lost, here) == []

    for at in range(ROWS):
        assert numpy.array_equal(numpy.asarray(element(here["rows"], at)), numpy.asarray(element(kept, at)))
    assert numpy.array_equal(numpy.asarray(here["x"]), numpy.asarray(lost["x"]))
    here["x"][...] = -5.0
    assert element(here["rows"], 70).min() == -5.0
    assert element(here["rows"], 9).min() == 9.0


def test_small_tensors_that_are_added_step_by_step_are_not_walked_over_again() -> None:
    losses = [torch.tensor(float(number)) for number in range(400)]
    counts = []
    for number in range(20):
        losses.append(torch.tensor(-float(number)))
        values.begin_boundary()
        walk = Snapshot({})
        counts.append(calls_of(lambda walk=walk: walk.node(losses, 0)))  # type: ignore[misc]
        here: Scope = {"losses": losses[:100]}
        assert carry({"losses": losses}, here) == []
        assert torch.equal(torch.stack(here["losses"]), torch.stack(losses))

    assert max(counts[-5:]) < 1500 < counts[0]


def test_a_small_tensor_that_was_added_shares_its_memory_with_the_variable_that_holds_it() -> None:
    def scope(count: int) -> Scope:
        losses = [torch.tensor(float(number)) for number in range(count)]
        loss = torch.tensor(7.0)
        losses.append(loss.detach())
        return {"losses": losses, "loss": loss}

    values.begin_boundary()
    lost, here = scope(300), scope(20)
    assert carry(lost, here) == []

    here["loss"] += 1
    assert here["losses"][-1] == 8.0


def test_samples_that_were_restored_are_recorded_by_the_replacement_as_they_had_been_changed() -> None:
    rows = MADE["pairs"]()
    node_of(rows)
    element(rows, 5).add_(1.0)
    node_of(rows)
    here = {"rows": MADE["pairs"]()}
    assert carry({"rows": rows}, here) == []

    assert type(node_of(here["rows"])) is ListNode

    second = {"rows": MADE["pairs"]()}
    assert carry(here, second) == []
    assert torch.equal(element(second["rows"], 5), element(rows, 5))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_large_array_that_was_restored_is_recorded_by_the_replacement_as_it_had_been_changed(kind: str) -> None:
    def made() -> Any:
        return torch.zeros(40_000) if kind == "tensor" else numpy.zeros(40_000)

    data = made()
    node_of(data)
    data[7] = 1.0
    assert type(node_of(data)) is ChangedDataNode
    here = {"rows": made()}
    assert carry({"rows": data}, here) == []

    assert type(node_of(here["rows"])) is ChangedDataNode

    second = {"rows": made()}
    assert carry(here, second) == []
    assert second["rows"][7] == 1.0


@pytest.mark.parametrize("count", [20, ROWS])
def test_samples_that_a_step_has_made_or_added_are_recorded_one_by_one(count: int) -> None:
    """A replay would not make them again: what an environment has answered, say."""
    rows = [tensor(number) for number in range(count)]
    node_of(rows if count < ROWS else [])
    node_of(rows if count < ROWS else [])
    rows += [tensor(-number) for number in range(ROWS)]

    assert type(node_of(rows)) is ListNode
    here: Scope = {"rows": [tensor(number) for number in range(20)]}
    assert carry({"rows": rows}, here) == []
    assert torch.equal(torch.stack(here["rows"]), torch.stack(rows))


@pytest.mark.parametrize(
    "rows",
    [
        [torch.zeros(64, requires_grad=True) for _ in range(ROWS)],
        [torch.zeros(1) for _ in range(ROWS)],
        [(tensor(1), [iter([])]) for _ in range(ROWS)],
        [tensor(number) for number in range(200)],
    ],
    ids=["with gradients", "little", "beside what cannot be seen", "few"],
)
def test_others_are_recorded_one_by_one(rows: Any) -> None:
    assert [type(node_of(rows)) for _ in range(3)] == [ListNode] * 3


def test_numbers_beyond_four_mib_are_data_too() -> None:
    rows = [[number, *range(1000, 3000)] for number in range(1200)]
    nodes = [node_of(rows) for _ in range(6)]
    assert [type(node) for node in nodes] == [DataTreeNode] * 6

    rows[3][0] = -1

    assert any(type(node_of(rows)) is ListNode for _ in range(40))
    here = {"rows": [[number, *range(1000, 3000)] for number in range(1200)]}
    assert carry({"rows": rows}, here) == []
    assert here["rows"] == rows


def test_two_processes_give_references_into_samples_the_same_numbers_if_they_are_compared() -> None:
    def compared() -> Any:
        rows = MADE["pairs"]()
        holder = {"rows": rows, "current": element(rows, 9)}
        return values.pack(Snapshot({}, is_separate=True).node(holder, 0))

    first = compared()
    large.fingerprint(tensor(1))
    assert compared() == first
