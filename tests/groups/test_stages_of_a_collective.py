"""Why the stages of a collective stand in their order: what goes wrong if two are exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.rank.fakes import make_session
from tests.rank.test_stages import outcomes, run
from ttprun.groups.collectives import STAGES, Call
from ttprun.groups.operations import Entry
from ttprun.introspect.current_rank import Mode, Rank
from ttprun.protocol.board import Field


class Group:
    """Notes what is done with a collective; nothing is issued."""

    threads = SimpleNamespace(is_of_main=True)

    def __init__(self, is_late: bool = False, is_repaired: bool = True) -> None:
        self.done: list[str] = []
        plainly = lambda *_: self.done.append("issued plainly")  # noqa: E731
        self.links = SimpleNamespace(member=SimpleNamespace(name="world", size=2), issue_plainly=plainly)
        self.buckets = SimpleNamespace(look_for_nan=lambda _: self.done.append("looked for NaN"))
        self.is_late = lambda _: is_late
        self.is_repaired = lambda _: is_repaired
        self.issue_unprotected = plainly

    def enter(self, entry: Entry, inputs: Any) -> bool:
        self.done.append("issued")
        return True


class Replay(Mode):
    is_live, is_alone = False, True


@pytest.fixture
def session() -> Iterator[Rank]:
    made = make_session()
    yield made
    made.channel.close()


def call_of(session: Rank, group: Group, device: str = "cpu") -> Call:
    tensors = [torch.ones(3, device=device)]
    return Call(session, group, Entry(group, "allreduce", (tensors, dist.AllreduceOptions()), tensors))


def test_every_stage_of_a_collective_says_why_it_stands_where_it_stands() -> None:
    names = [stage.name for stage in STAGES]

    assert len(set(names)) == len(names)
    assert all(len(stage.why_here) > 5 for stage in STAGES)


def test_what_is_left_to_the_backend_is_not_announced(session: Rank) -> None:
    def outcome(stages: tuple[Any, ...]) -> int:
        before = session.row[Field.COLLECTIVES]
        for stage in stages:
            if stage.name in ("device", "announce") and stage.act(call_of(session, Group(is_repaired=False), "meta")):
                break
        return int(session.row[Field.COLLECTIVES] - before)

    assert outcomes(STAGES, "device", "announce", outcome) == [0, 1]


def test_a_collective_that_another_takes_over_is_announced_before(session: Rank) -> None:
    session.unprotected = "it uses something else"

    def outcome(stages: tuple[Any, ...]) -> int:
        before = session.row[Field.COLLECTIVES]
        for stage in stages:
            if stage.name in ("announce", "hand over") and stage.act(call_of(session, Group(is_late=True))):
                break
        return int(session.row[Field.COLLECTIVES] - before)

    assert outcomes(STAGES, "announce", "hand over", outcome) == [1, 0]


def test_what_a_replay_answers_is_not_compared_with_what_survivors_have_issued(session: Rank) -> None:
    session.mode = Replay()

    def outcome(stages: tuple[Any, ...]) -> int:
        compared: list[Any] = []
        session.expected = SimpleNamespace(check=compared.append)
        for stage in stages:
            if stage.name in ("answer", "expect") and stage.act(call_of(session, Group())):
                break
        return len(compared)

    assert outcomes(STAGES, "answer", "expect", outcome) == [0, 1]


def test_what_survivors_have_not_issued_is_not_issued(session: Rank) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[str]:
        group = Group()
        session.expected = SimpleNamespace(check=lambda _: group.done.append("compared"))
        run(stages, "expect", "issue", known=call_of(session, group))
        return group.done

    assert outcomes(STAGES, "expect", "issue", outcome) == [["compared", "issued"], ["issued", "compared"]]


def test_nans_are_looked_for_while_all_ranks_wait_for_the_operation(session: Rank) -> None:
    session.options = msgspec.structs.replace(session.options, nan_limit_s=60.0)  # type: ignore[misc]

    def outcome(stages: tuple[Any, ...]) -> list[str]:
        group = Group()
        run(stages, "issue", "look", known=call_of(session, group))
        return group.done

    assert outcomes(STAGES, "issue", "look", outcome) == [["issued", "looked for NaN"], ["looked for NaN", "issued"]]
