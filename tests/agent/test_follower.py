"""What an agent does that another one leads."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.nodes import node_of
from ttprun.agent.base.ground import Failure, FirstFailure
from ttprun.agent.base.peers import Peers
from ttprun.agent.between.agent import Agent, Follower
from ttprun.protocol import meeting
from ttprun.protocol.board import SHARED, Field

OWN = Failure(1, 77, -9, "killed", traceback="of its own")


@pytest.mark.parametrize(
    ("own", "code", "kept"),
    [
        (OWN, -15, Failure(1, 0, -15, "node 0 was lost")),
        (OWN, -9, OWN),
        (None, 1, Failure(1, 0, 1, "node 0 was lost")),
    ],
)
def test_all_launchers_end_with_the_code_of_the_one_that_leads(own: Failure | None, code: int, kept: Failure) -> None:
    first_failure, verdicts = FirstFailure(), []
    if own is not None:
        first_failure.note(own, is_new_incident=True)
    node: Any = SimpleNamespace(
        here=[SimpleNamespace(rank=1)],
        slots=[None, None],
        first_failure=first_failure,
        verdict=None,
        end_by=lambda signal: None,
        hear_conclusion=verdicts.append,
        log=lambda event, **fields: None,
    )
    nobody: Any = None

    Follower(node, nobody, nobody).take_order(meeting.Concluded("fail", "node 0 was lost", True, code))

    assert first_failure.found == kept
    assert [verdict.kind for verdict in verdicts] == ["fail"]


AHEAD_NS = 5_000_000_000  # so much is the other node's clock ahead of ours


@pytest.fixture
def node(tmp_path: Path) -> Agent:
    """The agent that leads two nodes with one rank each."""
    found = node_of(tmp_path)
    found.begin_group([(0, 0)], Peers(0, "127.0.0.1", 1, {}, {0: "here", 1: "there"}, 2))
    return found


def arrive(node: Agent, seen_ns: int) -> int:
    """A row of rank 1 comes, some time after it was sent; returns when its hooks noted something, on our clock."""
    values = [seen_ns if field == Field.SEEN_NS else 0 for field in SHARED]
    node.copy_in([meeting.BoardRow(1, values, "S", 1.0)], time.monotonic_ns() + AHEAD_NS)
    return node.board.get(1, Field.SEEN_NS)


def test_what_a_rank_of_another_node_notes_later_is_later_here_and_nothing_new_is_nothing_new(node: Agent) -> None:
    seen_ns = time.monotonic_ns() + AHEAD_NS

    first = arrive(node, seen_ns)
    time.sleep(0.01)
    second = arrive(node, seen_ns)
    later = arrive(node, seen_ns + 20_000_000)

    assert first == second < later
    assert abs(first - (seen_ns - AHEAD_NS)) < 1_000_000_000
