"""Large tensors and arrays are hashed only when something may have been written to them, and then always."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ttprun.capture.records.nodes import ChangedDataNode, DataNode
from ttprun.capture.values import large, written_pages
from ttprun.capture.values.snapshot import Snapshot

ELEMENTS = 1 << 20
Array = np.ndarray[Any, Any]
_NOTHING: dict[int, int] = {}
MANY = 10  # boundaries


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    probe = np.zeros(ELEMENTS)
    can_watch = written_pages.watch(probe.ctypes.data, probe.nbytes) is not None
    written_pages.forget()
    if not can_watch:
        pytest.skip("this kernel or container does not report what is written")
    yield
    large.forget()


def record(value: Any) -> Any:
    """The node of a variable at a boundary."""
    return Snapshot(_NOTHING).node(value, 0)


def met_often(value: Any) -> list[Any]:
    """Its nodes at many boundaries."""
    return [record(value) for _ in range(MANY)]


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one number by way of .data": lambda one: one.data[777_777].fill_(7.0),
    "one number by way of numpy": lambda one: one.numpy().__setitem__(777_777, 7.0),
    "the last number by way of numpy": lambda one: one.numpy().__setitem__(-1, 7.0),
    "one number": lambda one: one[777_777].fill_(7.0),
    "smaller memory": lambda one: one.untyped_storage().resize_(400_000),
    "larger memory": lambda one: one.untyped_storage().resize_(80_000_000),
    "fewer numbers": lambda one: one.resize_(100_000),
    "more numbers": lambda one: one.resize_(20_000_000),
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
    assert [node for node in behind if node == before[-1]] == []


@pytest.mark.parametrize("elements", [ELEMENTS, 9 * ELEMENTS])  # of the larger one only samples are hashed
def test_one_number_written_to_an_array_behind_many_boundaries_is_seen(elements: int) -> None:
    array = np.ones(elements)
    before = met_often(array)

    array[elements // 3 + 77] = 7.0
    behind = met_often(array)

    assert set(map(type, before)) == {DataNode}
    assert set(map(type, behind)) == {ChangedDataNode}


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_what_nobody_writes_to_is_hashed_at_the_first_boundaries_only(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    digest = large._digest
    monkeypatch.setattr(large, "_digest", lambda value: (hashed.append(value.nbytes), digest(value))[1])
    value = make(ELEMENTS)

    met_often(value)
    at_first = len(hashed)
    met_often(value)

    assert 0 < at_first == len(hashed)


def test_two_arrays_over_the_same_memory_both_see_what_one_of_them_writes() -> None:
    whole = np.ones(ELEMENTS)
    half = whole[ELEMENTS // 2 :]
    for _ in range(MANY):
        record(whole)
        large.follow(half)

    half[5] = 7.0

    assert large.follow(whole)[1]
    assert large.follow(half)[1]


def test_memory_of_arrays_that_are_gone_is_let_go_of() -> None:
    for number in range(200):
        array = np.full(ELEMENTS // 8, number)
        nodes = met_often(array)
        assert nodes[-1] == nodes[0]
        del array
    gc.collect()

    assert written_pages._watched == []
    assert large._met == {}


def test_a_batch_of_which_one_sample_differs_has_another_hash_and_only_parts_of_it_are_read() -> None:
    batch = torch.rand(64, 3, 112, 112)
    other = batch.clone()
    other[17] += 0.01

    assert large.fingerprint(batch) == large.fingerprint(batch.clone())
    assert large.fingerprint(batch) != large.fingerprint(other)
    assert batch.nbytes / 16 > large._TENSOR_BLOCKS * large._BLOCK_BYTES
