"""A rank that the agent has ordered to end: nothing that it waits for comes any more, and its handlers must have a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.rank.fakes import make_session
from ttprun.groups.journal import EndedError, Journal
from ttprun.groups.operations import Entry
from ttprun.groups.work import ManagedWork
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.to_rank import EndAsked
from ttprun.rank.replay.order_thread import Recovery
from ttprun.rank.step.commit_barrier import commit

LIMIT_S = 60.0


class FakeGroup:
    """One whose operations a recovery would take up."""

    group_name = "world"

    def is_protected(self) -> bool:
        return True


@pytest.fixture
def session() -> Iterator[Rank]:
    """Of the second of two ranks, which a recovery has stopped."""
    made = make_session(rank=1, local_rank=1)
    made[Journal].is_frozen = True
    yield made
    made.channel.close()


def pending(session: Rank) -> Entry:
    """A collective that was broken off, or not begun."""
    entry = Entry(FakeGroup(), "allreduce", (), [torch.zeros(2)])  # type: ignore[arg-type]
    session[Journal].entries.append(entry)
    return entry


def order_end(session: Rank) -> None:
    """What comes from the agent behind the signal."""
    Recovery(session).take(EndAsked())


def raised_by(wait: Callable[[], object], session: Rank) -> list[type[BaseException]]:
    """What ends a wait that has begun when the rank is ordered to end; [] if it returns."""
    raised: list[type[BaseException]] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            wait()
        except BaseException as error:
            raised.append(type(error))

    waiting = threading.Thread(target=run, daemon=True)
    waiting.start()
    begun.wait()
    order_end(session)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive(), "it still waits"
    return raised


def test_what_ddp_waits_for_in_native_code_fails(session: Rank) -> None:
    future = pending(session).make_future()

    order_end(session)

    with pytest.raises(RuntimeError, match="the job is being ended"):
        future.wait()


def test_what_ddp_begins_to_wait_for_only_then_fails_too(session: Rank) -> None:
    entry = pending(session)
    order_end(session)

    with pytest.raises(RuntimeError, match="the job is being ended"):
        ManagedWork(session[Journal], entry).get_future().wait()


def test_what_the_script_waits_for_fails(session: Rank) -> None:
    entry = pending(session)

    assert raised_by(lambda: session[Journal].wait(entry), session) == [EndedError]


def test_a_rank_that_is_held_back_before_its_step_does_not_take_it(session: Rank) -> None:
    session.is_holding = True

    assert raised_by(lambda: commit(session, 1), session) == [EndedError]
    assert not session.is_applying


def test_a_rank_that_runs_steps_without_waiting_for_one_that_may_be_gone(session: Rank) -> None:
    session[Journal].is_frozen = False

    assert raised_by(lambda: commit(session, 1), session) == []
    assert session.is_applying


def test_a_collective_that_breaks_then_fails_at_once(session: Rank) -> None:
    entry = pending(session)
    future = entry.make_future()
    session[Journal].is_frozen = False
    entry.inner = object()
    order_end(session)

    session[Journal].note_failure(entry, entry.inner, RuntimeError("connection closed by peer"))

    with pytest.raises(RuntimeError, match="closed by peer"):
        future.wait()
