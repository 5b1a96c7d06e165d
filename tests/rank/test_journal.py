"""Waiting for an entry of the journal: what the backend's work says, and when."""

from __future__ import annotations

from typing import Any

import pytest

from ttprun.rank.journal import Entry, Journal


class FakeGroup:
    """Notes that an operation has completed."""

    is_on_device = False
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

    def wait(self, limit: Any) -> bool:
        self._has_ended = True
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self._has_ended

    def is_success(self) -> bool:
        return self._has_ended and self._ends_well


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
    """Protection may end between a recovery that has named givers and the next operation of the step."""
    journal = Journal(1 << 20)
    journal.givers = {("world", 0): 1}

    assert journal.giver_of(Entry(FakeGroup(), "barrier", (), [])) is None  # type: ignore[arg-type]
