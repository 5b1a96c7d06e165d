"""Rows of the board between nodes: how this node's ranks stand is sent, how the others' do is written to our board.

Times in a row are on the clock of the machine that sends it, and are moved to ours. Begin with `share`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from ttprun.agent.lead.hang_detector import state_of
from ttprun.agent.node.node import Node
from ttprun.protocol import node_reports
from ttprun.protocol.board import AWAITED, SHARED, Field

# Places in a row that was sent, and columns of the board.
_TIMES = [(SHARED.index(field), field) for field in (Field.SEEN_NS, Field.PULSE_NS)]
_AWAITED = [(SHARED.index(field), field) for field in AWAITED]
_PLAIN = [cell for cell in enumerate(SHARED) if cell not in (*_TIMES, *_AWAITED)]


def row_of(node: Node, rank: int) -> node_reports.BoardRow:
    """How one rank stands."""
    values, slot = [node.board.get(rank, field) for field in SHARED], node.slots[rank]
    if not slot.is_here:
        return node_reports.BoardRow(rank, values, slot.state, slot.cpu_s)
    process = node.process(rank)
    with contextlib.suppress(OSError, ValueError, IndexError):
        if process.pid and not process.is_buried:
            return node_reports.BoardRow(rank, values, *state_of(process.pid))
    return node_reports.BoardRow(rank, values)


def rows_of(node: Node, ranks: Iterable[int], is_awaited: bool = False) -> node_reports.Rows:
    """How these ranks, of any node, stand now.

    is_awaited   something has changed for which ranks of other nodes wait
    """
    return node_reports.Rows(time.monotonic_ns(), [row_of(node, rank) for rank in ranks], is_awaited)


def share(node: Node, ranks: Iterable[int]) -> None:
    """Let the other nodes know how these ranks stand, by `send_shared`: ranks there wait for it."""
    node.shared.update(ranks)


def send_shared(node: Node) -> None:
    """Send the rows that ranks of other nodes wait for: of one rank or of many, it is one message to each node."""
    ranks, node.shared = sorted(node.shared), set()
    if ranks and node.peers.connected:
        node.peers.to_all(rows_of(node, ranks, is_awaited=True))


def copy_in(node: Node, rows: Iterable[node_reports.BoardRow], now_ns: int) -> None:
    """Write how other nodes' ranks stand to our board, and wake who waits for it.

    now_ns   when they were sent, on the sender's clock
    """
    board, behind_ns = node.board, time.monotonic_ns() - now_ns
    for row in rows:
        slot = node.slots[row.rank]
        if slot.is_here:
            continue
        slot.state, slot.cpu_s = row.state, row.cpu_s
        ours, theirs = board.row(row.rank), row.values
        for at, field in _PLAIN:
            ours[field] = theirs[at]
        for at, field in _TIMES:
            if slot.noted_ns.get(field) != theirs[at]:  # moved anew each time, it would look new
                ours[field] = theirs[at] + behind_ns if theirs[at] else 0
                slot.noted_ns[field] = theirs[at]
        for at, field in _AWAITED:
            if ours[field] != theirs[at]:
                board.announce(row.rank, field, theirs[at])
