"""The futures of checkpoints that a thread writes (groups/async_saves.py): a replacement has one that is done."""

from __future__ import annotations

from typing import Any

from ttprun.capture import host
from ttprun.capture.records.nodes import SaveNode
from ttprun.capture.values.restore import Restore
from ttprun.introspect import futures


def is_save(future: Any) -> bool:
    """Whether a future is that of a save."""
    return futures.what_of(future) is not None


def record(future: Any) -> SaveNode:
    """The node of a save's future."""
    return SaveNode(futures.what_of(future) or "", future.done())


def restore_save(restore: Restore, live: Any, node: SaveNode, name: str) -> Any:
    """A future that is done."""
    session = host.current()
    if session is not None and restore.is_comparing and not node.is_done:
        session.mode.note_not_proved(futures.given_up(node.where))
    return live if futures.what_of(live) == node.where and live.done() else futures.done(node.where)
