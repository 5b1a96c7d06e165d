"""Waiting for an entry of the journal: what the backend's work says, and when."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank.processes import run_alone
from ttprun.groups import journal as journal_module
from ttprun.groups.journal import Journal
from ttprun.groups.operations import Entry
from ttprun.groups.work import ManagedWork


class FakeGroup:
    """Notes that an operation has completed."""

    group_name = "world"

    def is_protected(self) -> bool:
        return False

    def complete(self, entry: Entry, inner: Any) -> None:
        entry.is_done = True


class FakeWork:
    """An operation of the backend that ends in the moment in which a look at it gives up."""

    def __init__(self, ends_well: bool) -> None:
        self._ends_well = ends_well
        self._has_ended = False

    def wait(self, *limit: Any) -> bool:
        if self._has_ended and self._ends_well:
            return True
        self._has_ended = True
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self._has_ended


def test_a_collective_that_completes_in_the_moment_in_which_a_look_at_it_ends_is_no_failure() -> None:
    journal = Journal(limit_bytes=1)
    entry = Entry(FakeGroup(), "allreduce", (), [])  # type: ignore[arg-type]
    entry.inner = FakeWork(ends_well=True)

    journal.wait(entry)

    assert entry.is_done


def test_a_collective_that_has_failed_raises_its_error_if_no_recovery_will_answer_it() -> None:
    journal = Journal(limit_bytes=1)
    entry = Entry(FakeGroup(), "allreduce", (), [])  # type: ignore[arg-type]
    entry.inner = FakeWork(ends_well=False)

    with pytest.raises(RuntimeError, match="timed out"):
        journal.wait(entry)


def test_an_operation_that_was_not_kept_is_issued_and_given_by_nobody() -> None:
    """Protection may end between a recovery that has named sources and the next operation of the step."""
    journal = Journal(1 << 20)
    journal.sources = {("world", 0): 1}

    assert journal.source_of(Entry(FakeGroup(), "barrier", (), [])) is None  # type: ignore[arg-type]


def test_to_ask_whether_a_collective_has_completed_says_nothing_to_the_user(tmp_path: Path) -> None:
    """torch warns of some methods of its works, on the script's standard error."""
    assert run_alone(what_is_said_of_a_work, str(tmp_path / "said")) == (True, True, "")


def what_is_said_of_a_work(path: str) -> tuple[bool, bool, str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    journal, entry = Journal(1 << 20), Entry(FakeGroup(), "allreduce", (), [])  # type: ignore[arg-type]
    entry.inner = dist.all_reduce(torch.ones(1), async_op=True)
    entry.inner.wait()
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    work = ManagedWork(journal, entry)
    return work.is_completed(), work.is_success(), Path(path).read_text()


@pytest.mark.parametrize(("op", "sizes"), [("all_gather_single", (8, 4)), ("reduce_scatter_single", (4, 8))])
def test_of_a_gathered_layer_that_has_completed_the_copy_of_the_input_is_left(op: str, sizes: tuple[int, int]) -> None:
    journal = Journal(limit_bytes=1 << 20)
    output, given = (torch.ones(size) for size in sizes)
    entry = Entry(FakeGroup(), op, (output, given), [output])  # type: ignore[arg-type]
    journal.entries.append(entry)
    assert journal.save(entry, [given])
    before, held = entry.signature, [weakref.ref(output), weakref.ref(given)]

    entry.is_passing = True
    entry.release()
    del output, given

    assert (entry.signature, entry.args[0].shape) == (before, (sizes[0],))
    assert [one() is None for one in held] == [op == "all_gather_single", True]
    assert torch.equal(entry.input.tensors[0], torch.ones(sizes[1]))
    journal.clear()
    assert journal.save(entry, [torch.zeros(sizes[1])])  # its buffer is used again


def test_a_copy_made_while_a_script_validates_in_inference_mode_serves_its_training_too() -> None:
    journal = Journal(1 << 20)

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        """As a group does it; returns the copy."""
        entry = Entry(FakeGroup(), "allreduce", ([tensor],), [tensor])  # type: ignore[arg-type]
        assert journal.save(entry, [tensor])
        (copy,) = entry.input.tensors
        journal.entries.append(entry)
        entry.is_done = True
        journal.clear()
        return copy

    all_reduce(torch.ones(4))  # what the first step has copied is freed with it
    with torch.inference_mode():
        first = all_reduce(torch.ones(4))
    second = all_reduce(torch.full((4,), 2.0))

    assert second is first
    assert second.tolist() == [2.0] * 4


def test_copies_of_what_comes_once_are_freed_with_the_first_steps() -> None:
    """Weights that DDP sends when it is made; gradients in the buckets of its first pass; buckets once they are held."""
    journal = Journal(limit_bytes=1 << 30)

    def step(*shapes: int) -> set[int]:
        for shape in shapes:
            tensor = torch.zeros(shape)
            entry = Entry(FakeGroup(), "allreduce", ([tensor],), [tensor])  # type: ignore[arg-type]
            assert journal.save(entry, [tensor])
            journal.entries.append(entry)
            entry.is_done = True
        journal.clear()
        return {shape[0] for shape, _, _ in journal._spare}

    assert step(100, 20) == set()
    assert step(30, 40) == {30, 40}
    assert step(30) == {30}
    assert step() == set()


@pytest.mark.parametrize("is_on_device", [False, True])
def test_the_limit_follows_a_device_only_where_operations_are_on_one(
    monkeypatch: pytest.MonkeyPatch, is_on_device: bool
) -> None:
    """A script that computes on a GPU may gather on the CPU: what it leaves free there says nothing of the host."""
    monkeypatch.setattr(journal_module.accelerator, "unclaimed_bytes", lambda: 64 << 20)
    journal = Journal(4 << 20)
    journal.follows_device = is_on_device

    assert journal.has_learnt != is_on_device
    assert journal.reserve(new_entry(), 3 << 20) != is_on_device  # of the first steps: a 64th of it
    for _ in range(3):
        journal.clear()

    assert journal.has_learnt
    assert journal.reserve(new_entry(), 30 << 20) == is_on_device
    assert "32 MiB that the script leaves" in str(journal.why_full) or not is_on_device


def new_entry() -> Entry:
    return Entry(SimpleNamespace(group_name="0"), "allreduce", (), [])
