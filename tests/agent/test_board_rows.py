"""Rows of the board between nodes: what a rank of another node notes looks here as it does there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.agent.nodes import node_of
from ttprun.agent.between import follower
from ttprun.agent.between.peers import Peers
from ttprun.agent.node.node import Node
from ttprun.protocol import node_messages
from ttprun.protocol.board import SHARED, Field

AHEAD_NS = 5_000_000_000  # so much is the other node's clock ahead of ours


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The agent that leads two nodes with one rank each."""
    found = node_of(tmp_path)
    found.begin_group([(0, 0)], Peers(0, "127.0.0.1", 1, {}, {0: "here", 1: "there"}, 2))
    return found


def arrive(node: Node, seen_ns: int) -> int:
    """A row of rank 1 comes, some time after it was sent; returns when its hooks noted something, on our clock."""
    values = [seen_ns if field == Field.SEEN_NS else 0 for field in SHARED]
    follower.copy_in(node, [node_messages.BoardRow(1, values, "S", 1.0)], time.monotonic_ns() + AHEAD_NS)
    return node.board.get(1, Field.SEEN_NS)


def test_a_rank_of_another_node_that_notes_nothing_new_seems_to_note_nothing_new(node: Node) -> None:
    seen_ns = time.monotonic_ns() + AHEAD_NS

    first = arrive(node, seen_ns)
    time.sleep(0.01)
    second = arrive(node, seen_ns)

    assert first == second
    assert abs(first - (seen_ns - AHEAD_NS)) < 1_000_000_000


def test_what_a_rank_of_another_node_notes_later_is_later_here(node: Node) -> None:
    seen_ns = time.monotonic_ns() + AHEAD_NS

    first = arrive(node, seen_ns)
    second = arrive(node, seen_ns + 20_000_000)

    assert second > first
