"""Large tensors and arrays are hashed while they may be written, and in turns once they have been the same for some boundaries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttprun.capture.records.nodes import ChangedDataNode, DataNode
from ttprun.capture.values import changes, large
from ttprun.capture.values.snapshot import Snapshot

ELEMENTS = 1 << 20
Array = np.ndarray[Any, Any]
_NOTHING: dict[int, int] = {}
MANY = 10  # boundaries
A_ROUND = ELEMENTS * 8 // large.TURN_BYTES  # of one of ELEMENTS


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    large.forget()


def record(value: Any) -> Any:
    """The node of a variable at the next boundary."""
    changes.begin_boundary()
    return Snapshot(_NOTHING).node(value, 0)


def met_often(value: Any, boundaries: int = MANY) -> list[Any]:
    """Its nodes at many boundaries."""
    return [record(value) for _ in range(boundaries)]


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one number": lambda one: one[777_777].fill_(7.0),
    "smaller memory": lambda one: one.untyped_storage().resize_(400_000),
    "larger memory": lambda one: one.untyped_storage().resize_(80_000_000),
    "fewer numbers": lambda one: one.resize_(100_000),
    "more numbers": lambda one: one.resize_(20_000_000),
    "another shape": lambda one: one.unsqueeze_(0),
    "other memory": lambda one: setattr(one, "data", torch.ones(ELEMENTS + 1)),
    "another type": lambda one: setattr(one, "data", torch.ones(ELEMENTS, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", TENSORS)
def test_whatever_is_done_to_a_tensor_behind_many_boundaries_is_seen(change: str) -> None:
    tensor = torch.ones(ELEMENTS)
    before = met_often(tensor)

    TENSORS[change](tensor)
    if "memory" in change:
        tensor.resize_(100_000)  # it can be read again
    behind = met_often(tensor)

    assert set(map(type, before)) == {DataNode}
    assert behind[0] != before[-1]
    assert (behind[0].shape, f"torch.{behind[0].dtype}") == (list(tensor.shape), str(tensor.dtype))
    assert [node for node in behind if node == before[-1]] == []


UNCOUNTED: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "an array": (np.ones, lambda one: one.__setitem__(777, 7.0)),
    "the last number of an array": (np.ones, lambda one: one.__setitem__(-1, 7.0)),
    "a tensor by way of .data": (torch.ones, lambda one: one.data[777].fill_(7.0)),
    "a tensor by way of numpy": (torch.ones, lambda one: one.numpy().__setitem__(777, 7.0)),
    "the last number by way of numpy": (torch.ones, lambda one: one.numpy().__setitem__(-1, 7.0)),
}


@pytest.mark.parametrize("change", UNCOUNTED)
def test_one_number_written_where_nothing_counts_it_is_seen_when_its_turn_comes(change: str) -> None:
    make, write = UNCOUNTED[change]
    value = make(ELEMENTS)
    before = met_often(value)

    write(value)
    behind = met_often(value, A_ROUND)

    assert set(map(type, before)) == {DataNode}
    assert type(behind[-1]) is ChangedDataNode
    kinds = [type(node) for node in behind]
    assert kinds == sorted(kinds, key=[DataNode, ChangedDataNode].index)  # and stays seen


@pytest.mark.parametrize("change", UNCOUNTED)
def test_of_little_in_all_each_write_is_seen_at_the_next_boundary(change: str) -> None:
    make, write = UNCOUNTED[change]
    value = make(large.TURN_BYTES // 16)  # half of what is looked at
    before = met_often(value)

    write(value)

    assert {node.age for node in before} == {0}
    assert {type(node) for node in met_often(value)} == {ChangedDataNode}


def test_a_record_names_how_long_ago_all_of_it_was_looked_at() -> None:
    first, second = np.ones(ELEMENTS), np.ones(ELEMENTS)
    for _ in range(2 * A_ROUND + large._LOOKS):
        nodes = [record(first), Snapshot(_NOTHING).node(second, 0)]

    assert {0 < node.age < 2 * A_ROUND for node in nodes} == {True}


def test_where_no_step_follows_as_evidence_all_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes.Clock, "is_whole", True)
    array = np.ones(ELEMENTS)
    before = met_often(array)

    array[777] = 7.0

    assert {node.age for node in before} == {0}
    assert type(record(array)) is ChangedDataNode


def test_a_row_written_to_an_array_of_which_only_samples_are_hashed_is_seen_when_its_turn_comes() -> None:
    array = np.ones(9 * ELEMENTS)
    before = met_often(array)

    array[3 * ELEMENTS :][:1200] = 7.0  # further than from one sample to the next
    behind = met_often(array, large._SHARES)

    assert set(map(type, before)) == {DataNode}
    assert type(behind[-1]) is ChangedDataNode


@pytest.mark.parametrize("elements", [ELEMENTS, 9 * ELEMENTS])
def test_of_what_nobody_writes_to_so_much_is_hashed_at_a_boundary_and_no_more(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    digest, part = large.fingerprint_of_all, large._Met.part
    monkeypatch.setattr(large, "fingerprint_of_all", lambda value: (hashed.append(value.nbytes), digest(value))[1])
    monkeypatch.setattr(large._Met, "part", lambda self, which: (hashed.append(-1), part(self, which))[1])
    arrays = [np.ones(elements), np.ones(elements)]
    for _ in range(large._LOOKS + 1):
        met_often(arrays, 1)
    hashed.clear()

    met_often(arrays)

    assert hashed == [-1] * MANY


def test_data_that_is_read_from_a_file_as_it_is_needed_is_not_read_in_turns(tmp_path: Path) -> None:
    np.ones(ELEMENTS).tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", mode="r")

    met_often(mapped)

    assert not large._turns


def test_what_is_not_met_any_more_is_not_looked_at() -> None:
    array, other = np.ones(ELEMENTS), np.ones(ELEMENTS)
    met_often(array)

    met_often(other, 2 * A_ROUND)

    assert {id(known.reference()) for known, _, _ in large._turns} == {id(other)}


def test_two_arrays_over_the_same_memory_both_see_what_one_of_them_writes() -> None:
    whole = np.ones(ELEMENTS)
    half = whole[ELEMENTS // 2 :]
    for _ in range(MANY):
        record(whole)
        large.follow(half)

    half[5] = 7.0
    for _ in range(2 * A_ROUND):
        record(whole)
        large.follow(half)

    assert large.follow(whole)[1]
    assert large.follow(half)[1]


def test_memory_of_arrays_that_are_gone_is_let_go_of() -> None:
    for number in range(200):
        array = np.full(ELEMENTS // 8, number)
        nodes = met_often(array)
        assert nodes[-1] == nodes[0]
        del array
    gc.collect()

    assert large._met == {}
    assert len(large._turns) <= 1


def test_a_batch_of_which_one_sample_differs_has_another_hash_and_only_parts_of_it_are_read() -> None:
    batch = torch.rand(64, 3, 112, 112)
    other = batch.clone()
    other[17] += 0.01

    assert large.fingerprint(batch) == large.fingerprint(batch.clone())
    assert large.fingerprint(batch) != large.fingerprint(other)
    assert batch.nbytes / 16 > large._TENSOR_BLOCKS * large._BLOCK_BYTES
