"""Memory that is there before the ranks need it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ttprun.agent.base import stored_states

MIB = 1 << 20


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Two empty files in memory."""
    made = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("one", "other")]
    yield made
    for fd in made:
        os.close(fd)


def held_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_files_have_their_memory_before_anything_is_written(files: list[int]) -> None:
    stored_states.take_ahead(files, 65 * MIB + 5).join(60)

    assert [held_bytes(fd) // MIB for fd in files] == [65, 65]
    assert [os.fstat(fd).st_size for fd in files] == [65 * MIB + 5] * 2


def test_where_there_is_not_enough_memory_nothing_is_taken(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_states, "free_bytes", lambda: 3 * MIB)

    stored_states.take_ahead(files, 2 * MIB).join(60)

    assert [held_bytes(fd) for fd in files] == [0, 0]


def open_files() -> list[str]:
    """What this process's descriptors lead to; other tests' threads may close theirs meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_files_that_are_closed_meanwhile_are_no_trouble() -> None:
    fd = os.memfd_create("gone", os.MFD_CLOEXEC)

    taking = stored_states.take_ahead([fd], 130 * MIB)
    os.close(fd)
    taking.join(60)

    assert not taking.is_alive()
    assert not [link for link in open_files() if "gone" in link]
