"""What a collective costs beside its backend: counted, as time cannot be on a busy machine.

Each call of a function counts, of Python's and of C's, from the script's own call to the end of its wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.calls import calls_of
from tests.rank.fakes import make_session
from ttprun.capture.records.evidence import ALWAYS
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import ManagedGroup
from ttprun.introspect import current_rank
from ttprun.introspect.current_rank import INPUT, Rank

PLAIN = 82  # an all-reduce of which the journal keeps a copy; 172 before these were counted
WITH_EVIDENCE = 56  # more, where its input is noted
STEP = 5
FLOATS = 64 << 10


class Work:
    """Done at once."""

    def wait(self, *limit: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Link:
    """A connection that does nothing."""

    generation = 0
    backend = None

    def issue(self, op: str, args: Any) -> Work:
        return Work()


@pytest.fixture
def session() -> Iterator[Rank]:
    made = make_session()
    made.applied = STEP
    current_rank.begin(made)
    yield made
    current_rank.end()
    made.channel.close()


def group_of(session: Rank) -> ManagedGroup:
    group = ManagedGroup(session, session[Exchange], "world", [0, 1], 0, timedelta(seconds=5))
    link: Any = Link()
    group.links._by_type = {"cpu": link}
    return group


def test_a_collective_of_a_step_with_many_makes_few_calls_and_most_inputs_are_not_hashed(session: Rank) -> None:
    group, options = group_of(session), dist.AllreduceOptions()
    tensor = torch.ones(FLOATS)

    def reduce() -> None:
        group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]

    for _ in range(2):  # what the first step has copied is freed with it; the second one's copies are used again
        for _ in range(10 * ALWAYS):
            reduce()
        session[Journal].clear()
        session.applied += 1
    counts = [calls_of(reduce) for _ in range(10 * ALWAYS)]

    noted = [number for kind, _, number in session[Recorder].evidence.left(STEP + 2) if kind == INPUT]
    rest = [count for number, count in enumerate(counts) if number not in noted]
    assert noted[:ALWAYS] == list(range(ALWAYS))
    assert len(rest) > len(noted)
    assert max(rest) <= PLAIN, counts
    assert max(counts) <= PLAIN + WITH_EVIDENCE, counts


def test_no_lock_is_taken_more_often_than_to_issue_and_to_complete(session: Rank) -> None:
    group, options = group_of(session), dist.AllreduceOptions()
    tensor, taken = torch.ones(FLOATS), []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__qualname__", "") == "RLock.__exit__":
            taken.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]
    finally:
        sys.setprofile(None)

    assert taken == ["ManagedGroup.enter", "ManagedGroup.complete"]
