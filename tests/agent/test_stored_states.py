"""What a run goes back to from a checkpoint on disk: refused with a reason where a file is not what was packed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.state.making import DESCRIPTION, locked
from ttprun.agent.base import stored_states
from ttprun.agent.base.stored_states import STATE_FILE, open_checkpoint
from ttprun.state.checkpoint import inspect
from ttprun.state.files import InvalidCheckpointError

STATE = {"arguments": ["train.py"], "header": [["weight", "F32"]], "headers": {1: []}, "owners": {"weight": [0, 1]}}


def stored_in(folder: Path, state: Any) -> Path:
    """A checkpoint with this file of what all ranks share."""
    draft = locked(folder / "save").begin(3)
    draft.add(STATE_FILE, msgpack.packb(state))
    return draft.commit(DESCRIPTION).path


def test_what_all_ranks_share_is_read(tmp_path: Path) -> None:
    stored = open_checkpoint(inspect(stored_in(tmp_path, STATE)), 0.0)

    assert stored.arguments == ("train.py",)
    assert stored.header_of(0) == [["weight", "F32"]]
    assert stored.header_of(1) == []
    assert stored.owners == {"weight": (0, 1)}


@pytest.mark.parametrize("wrong", [{"owners": {"weight": 7}}, {"headers": [1]}, {"names": 3}, {"arguments": [None]}])
def test_a_value_of_another_type_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    made = stored_in(tmp_path, STATE | wrong)

    with pytest.raises(InvalidCheckpointError, match=f"{STATE_FILE} is damaged: it is not what was packed"):
        open_checkpoint(inspect(made), 0.0)


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
