"""Arrays of numpy in variables, and what shares memory with them: carried, compared, or refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.capture.values.carrying import (
    LARGE,
    Scope,
    carry,
    is_refused,
    record,
)
from ttprun.capture.values import Restore


@pytest.mark.parametrize("length", [10, LARGE], ids=["small", "large"])
def test_a_file_that_is_written_as_an_array_stays_that_file(tmp_path: Path, length: int) -> None:
    lost = np.memmap(tmp_path / "lost", np.float32, "w+", shape=(length,))
    here: Scope = {"losses": np.memmap(tmp_path / "here", np.float32, "w+", shape=(length,))}
    for fill in (1.0, 2.0):  # a large one is known to change when it has done so between two boundaries
        lost[:] = fill
        recorded, blobs = record({"losses": lost})

    Restore(blobs, is_comparing=True).module(here, recorded, "")
    here["losses"][0] = 5.0
    here["losses"].flush()

    assert np.fromfile(tmp_path / "here", np.float32).tolist() == [5.0, *[2.0] * (length - 1)]


def _pair(whole: Any, part: Any) -> Scope:
    return {"whole": whole, "part": part}


def of_tensor() -> Scope:
    whole = torch.zeros(4)
    return _pair(whole, whole.numpy())


def of_detached_tensor_first() -> Scope:
    whole = torch.zeros(4)
    return {"part": whole.detach().numpy()[:2], "whole": whole}


def of_large_array() -> Scope:
    whole = np.zeros(LARGE)
    return _pair(whole, whole[2:6])


def of_large_array_first() -> Scope:
    whole = np.zeros(LARGE)
    return {"part": whole[2:6], "whole": whole}


def of_file() -> Scope:
    return {"part": np.frombuffer(mmap.mmap(-1, 4096), dtype=np.float32)[:8]}


ARRAYS = [of_tensor, of_detached_tensor_first, of_large_array, of_large_array_first, of_file]


@pytest.mark.parametrize("make", ARRAYS)
def test_an_array_whose_memory_something_else_holds_is_written_there(make: Callable[[], Scope]) -> None:
    lost, here = make(), make()
    held_elsewhere = here["part"][:]
    record(lost)
    lost["part"][:] = 7

    assert carry(lost, here) == []
    here["part"][1] = 9

    assert held_elsewhere.tolist() == here["part"].tolist() == [7, 9, *lost["part"].tolist()[2:]]
    assert "whole" not in here or np.shares_memory(here["part"], np.frombuffer(memory_of(here["whole"]), np.uint8))


def memory_of(whole: Any) -> Any:
    return whole.numpy() if isinstance(whole, torch.Tensor) else whole


@pytest.mark.parametrize("make", ARRAYS)
def test_an_array_that_the_replay_has_not_made_shares_the_same_memory_or_is_refused(make: Callable[[], Scope]) -> None:
    lost, here = make(), make() | {"part": None}
    for fill in (1, 2):
        lost["part"][:] = fill
        record(lost)

    refused = is_refused(lost, here)
    if not refused:
        here["part"][1] = 9

    assert refused or np.shares_memory(here["part"], np.frombuffer(memory_of(here["whole"]), np.uint8))
    assert refused == (make is of_file)


def test_a_row_of_a_large_array_that_stays_as_it_is_comes_back_wherever_the_replay_has_one() -> None:
    """`image = images[i]`: what stands in row i of the replacement's own images must not be written over."""
    lost, live = np.arange(float(LARGE)).reshape(-1, 4), np.arange(float(LARGE)).reshape(-1, 4)
    here: Scope = {"images": live, "image": live[3], "another": None}

    mismatches = carry({"images": lost, "image": lost[17], "another": lost[18]}, here)

    assert mismatches == []
    assert here["image"].tolist() == lost[17].tolist()
    assert here["another"].tolist() == lost[18].tolist()
    assert np.array_equal(live, lost)


def test_an_array_that_looks_at_a_weight_looks_at_the_replacements_own() -> None:
    lost, live = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    recorded, blobs = record({"look": lost.detach().numpy(), "new": lost.detach().numpy()[1:]}, {lost.data_ptr()})
    here: Scope = {"look": live.detach().numpy(), "new": None}

    Restore(blobs, is_comparing=True, stepped=[live]).module(here, recorded, "")
    live.data.fill_(5)

    assert here["look"].tolist() == [5.0, 5.0, 5.0]
    assert here["new"].tolist() == [5.0, 5.0]


def _of_one_array() -> Scope:
    whole = np.arange(8.0)
    return {"a": whole, "t": torch.from_numpy(whole), "part": torch.from_numpy(whole[2:])}


SHARED: dict[str, Callable[[], Scope]] = {
    "parts of a tensor": lambda: (lambda t: {"a": t[:5], "b": t[3:], "c": t.view(5, 2)})(torch.arange(10.0)),
    "an array of a tensor": lambda: (lambda t: {"t": t, "a": t.numpy()})(torch.arange(4.0)),
    "an array of a tensor, met first": lambda: (lambda t: {"a": t.numpy()[1:], "t": t})(torch.arange(4.0)),
    "tensors of an array": _of_one_array,
    "an array of which a tensor was met first": lambda: dict(reversed([*_of_one_array().items()][:2])),
    "parts of an array": lambda: (lambda a: {"x": a[:5], "y": a[3:]})(np.arange(8.0)),
    "what is large": lambda: (lambda t: {"t": t, "a": t.numpy()})(torch.zeros(LARGE)),
}


def _add(scope: Scope) -> None:
    for value in scope.values():
        value += 1


@pytest.mark.parametrize("are_made", ["here, together", "here, apart", "not here"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_lies_in_one_memory_does_so_in_the_replacement_or_is_refused(kind: str, are_made: str) -> None:
    lost, here = SHARED[kind](), SHARED[kind]()
    for _ in range(2):
        record(lost)
        _add(lost)
    if are_made != "here, together":
        here = (
            {}
            if are_made == "not here"
            else {
                name: value.copy() if isinstance(value, np.ndarray) else value.clone() for name, value in here.items()
            }
        )

    refused = is_refused(lost, here)
    _add(lost)
    if not refused:
        _add(here)

    assert refused == (kind == "what is large" and are_made != "here, together")
    assert refused or {n: v.tolist() for n, v in here.items()} == {n: v.tolist() for n, v in lost.items()}
