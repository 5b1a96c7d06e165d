"""Memory that is watched is known to be untouched until somebody writes to it, in whatever way."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttprun.capture.values import written_pages
from ttprun.capture.values.written_pages import Watched, watch

SIZE = 1 << 20
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    probe = np.zeros(SIZE, np.uint8)
    if watch(probe.ctypes.data, SIZE) is None:
        pytest.skip("this kernel or container does not report what is written")
    yield
    written_pages.forget()


def _watched(array: Array) -> Watched:
    found = watch(array.ctypes.data, array.nbytes)
    assert found is not None
    return found


def _read_a_file(array: Array) -> None:
    with open("/dev/zero", "rb", buffering=0) as zeros:
        assert zeros.readinto(memoryview(array)[SIZE // 2 : SIZE // 2 + 10]) == 10


WRITES: dict[str, Callable[[Array], Any]] = {
    "an element": lambda array: array.__setitem__(SIZE // 3, 1),
    "the first one": lambda array: array.__setitem__(0, array[0] ^ 1),
    "the last one": lambda array: array.__setitem__(-1, array[-1] ^ 1),
    "all": lambda array: array.fill(3),
    "by way of torch": lambda array: torch.from_numpy(array)[12345].fill_(1),
    "by its address": lambda array: ctypes.memset(array.ctypes.data + SIZE // 2, 1, 1),
    "the kernel, from a file": _read_a_file,
}


@pytest.mark.parametrize("make", [np.zeros, np.ones, np.empty])
@pytest.mark.parametrize("write", WRITES)
def test_each_write_is_seen_and_stays_seen_until_it_is_noted(write: str, make: Any) -> None:
    array = make(SIZE, np.uint8)
    watched = _watched(array)
    untouched = [watched.is_untouched() for _ in range(3)]

    WRITES[write](array)

    assert untouched == [True] * 3
    assert [watched.is_untouched() for _ in range(3)] == [False] * 3
    watched.note()
    assert [watched.is_untouched() for _ in range(3)] == [True] * 3


def test_writes_to_many_places_are_noted_as_one() -> None:
    array = np.zeros(SIZE, np.uint8)
    watched = _watched(array)

    array[:: 2 * mmap.PAGESIZE] = 1
    is_untouched = watched.is_untouched()
    watched.note()

    assert (is_untouched, watched.is_untouched()) == (False, True)


def test_reading_it_and_writing_beside_it_is_no_write() -> None:
    whole = np.zeros(3 * SIZE, np.uint8)
    array = whole[SIZE + 100 : 2 * SIZE + 100]
    watched = _watched(array)

    whole[SIZE + 99] = whole[2 * SIZE + 100] = 1
    total = int(array.sum())

    assert (total, watched.is_untouched()) == (0, True)


def test_a_forked_child_changes_its_own_memory_and_not_ours() -> None:
    array = np.zeros(SIZE, np.uint8)
    watched = _watched(array)

    child = os.fork()
    if not child:
        array[:] = 1
        watched.end()
        own = watch(array.ctypes.data, SIZE)  # as a copy of a standby does, which becomes a rank
        array[0] = 2
        os._exit(0 if own is not None and not own.is_untouched() else 1)
    _, status = os.waitpid(child, 0)
    is_untouched = watched.is_untouched()
    array[SIZE // 2] = 1

    assert (status, is_untouched, watched.is_untouched(), watched.is_over) == (0, True, False, False)


def test_a_process_that_ends_while_it_watches_says_nothing() -> None:
    source = """
import builtins, numpy as np
from ttprun.capture.values import large
builtins.array = np.zeros(1 << 20)  # lives longer than all modules
for _ in range(9):
    large.follow(array)
print(large._met[id(array)].watched.is_untouched())
"""

    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)

    assert (done.stdout, done.stderr) == ("True\n", "")


def test_memory_that_others_can_write_is_not_watched(tmp_path: Path) -> None:
    shared = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    of_file = np.memmap(tmp_path / "array", np.uint8, "w+", shape=(SIZE,))
    copied = np.memmap(tmp_path / "array", np.uint8, "c", shape=(SIZE,))
    passed_on = torch.zeros(SIZE, dtype=torch.uint8).share_memory_().numpy()

    assert [watch(one.ctypes.data, SIZE) for one in (shared, of_file, copied, passed_on)] == [None] * 4


def test_memory_that_is_mapped_anew_is_not_known_to_be_untouched() -> None:
    mapped = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(mapped, np.uint8)
    watched = _watched(array)
    at = array.ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p

    fixed = 0x10
    assert libc.mmap(at, SIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0) == at

    assert not watched.is_untouched()
    watched.note()
    assert not watched.is_untouched()


def test_what_is_over_is_watched_no_more_and_its_place_is_free() -> None:
    arrays = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    for _ in range(200):
        for watched in [_watched(array) for array in arrays]:
            watched.end()

    assert not watched.is_untouched()
    assert _watched(arrays[0]).is_untouched()


def test_what_is_watched_is_watched_by_one_alone() -> None:
    array = np.zeros(SIZE, np.uint8)
    watched = _watched(array)
    half = array[SIZE // 2 :]

    beside_it = watch(half.ctypes.data, half.nbytes)
    watched.end()

    assert beside_it is None
    assert _watched(half).is_untouched()


def test_no_more_is_watched_than_can_be_asked_for_in_each_step() -> None:
    array = np.empty(written_pages._MOST_BYTES // 2, np.uint8)
    half, more = array[: array.size // 2], np.empty(written_pages._MOST_BYTES, np.uint8)
    watched = _watched(half)

    refused = watch(more.ctypes.data, more.nbytes)
    watched.end()

    assert refused is None
    assert _watched(array).is_untouched()


def test_what_cannot_be_watched_is_no_reason_to_watch_nothing() -> None:
    written_pages.forget()
    shared, array = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8), np.zeros(SIZE, np.uint8)

    refused = watch(shared.ctypes.data, SIZE)

    assert refused is None
    assert _watched(array).is_untouched()
