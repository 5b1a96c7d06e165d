"""The commit over nodes: all ranks have recorded the boundary, and each record has a copy on another node.

Inside a node the board says who has recorded what, and of which boundary it keeps a copy of another node's record
(COPIED, see `copies.py`). Of two nodes each knows by that what the other has recorded. Of more, the first ranks reduce
the lowest boundary over a small gloo group of their own, whose cost grows with the logarithm of the number of nodes.
The first rank writes the result to the board of its node (ALL_NODES_AT). Both hold in one generation only: after a
recovery all nodes commit anew, since a replacement records anew. Begin with `InterNodeCommit.wait`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttprun.groups.connection import Connection, Exchange, GenerationOverError, GivenUpError
from ttprun.groups.journal import REPORT_AFTER_S, has_ended
from ttprun.protocol.board import FINISHED, Field
from ttprun.rank.session import Session
from ttprun.rank.step.copies import Copies

_NO_LIMIT = timedelta(days=365)  # a rank may evaluate for hours while the others wait before their step
_STUCK_AFTER_S = 2.0  # after a cut; an operation that can end does so within milliseconds
_BOUNDARY_BITS = 40
_GROUP = "ttprun's first ranks of all nodes"


class InterNodeCommit:
    """This rank's part in it: the first rank of its node reduces, the others wait for what it writes."""

    def __init__(self, session: Session, copies_fd: int) -> None:
        """`copies_fd`: memfd for the records of a rank of another node."""
        self._session = session
        self._copies = Copies(session, copies_fd)
        here = len(session.rows_here)
        self._firsts = range(0, session.world_size, here)
        self._first = session.rows_here.start
        self._connection: Connection | None = None
        self._announced_in = -1
        self._reported_in = -1

    def is_past(self, boundary: int) -> bool:
        """Whether all nodes have recorded the boundary, in this generation; once a first rank has ended, always."""
        generation, recorded = divmod(self._session.board.get(self._first, Field.ALL_NODES_AT), 1 << _BOUNDARY_BITS)
        if generation == self._session.generation and recorded >= boundary:
            return True
        board = self._session.board
        return any(board.get(first, Field.RECORDED) == FINISHED for first in self._firsts)

    def wait(self, boundary: int, may_stop: Callable[[], bool], look_again_s: float) -> None:
        """Once all ranks of this node have recorded the boundary: wait for the other nodes.

        may_stop   called now and then; True, or an exception, ends the wait

        Returns when the boundary is past, when `may_stop` says so, or when the generation is over.
        """
        session = self._session
        generation = session.generation
        at = (generation << _BOUNDARY_BITS) + boundary
        while not (self.is_past(boundary) or may_stop() or session.generation != generation):
            try:
                if session.board.get(session.rank, Field.COPIED) != at:
                    if self._copies.keep_up(generation, boundary, may_stop, look_again_s):
                        session.board.announce(session.rank, Field.COPIED, at)
                elif session.rank != self._first:
                    self._wait_for(self._first, Field.ALL_NODES_AT, at, look_again_s)
                elif (late := self._late(at)) is not None:
                    self._wait_for(late, Field.COPIED, at, look_again_s)
                elif len(self._firsts) == 2:
                    session.board.announce(self._first, Field.ALL_NODES_AT, at)
                else:
                    self._reduce(generation, boundary, may_stop, look_again_s)
            except (GenerationOverError, GivenUpError):
                return
            except (RuntimeError, OSError) as error:  # a connection of this generation is broken
                self._await_next(generation, boundary, error, may_stop)

    def _late(self, at: int) -> int | None:
        """A rank of this node that does not keep its copy yet."""
        return next((row for row in self._session.rows_here if self._session.board.get(row, Field.COPIED) < at), None)

    def _wait_for(self, row: int, field: int, at: int, look_again_s: float) -> None:
        board = self._session.board
        seen = board.get(row, field)
        if seen < at:
            board.wait_for_change(row, field, seen, look_again_s)

    def _reduce(self, generation: int, boundary: int, may_stop: Callable[[], bool], look_again_s: float) -> None:
        connection = self._connected_in(generation, may_stop, look_again_s)
        if connection is None:
            return
        lowest = torch.tensor([boundary])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        work = connection.backend.allreduce([lowest], options)
        while not has_ended(work, look_again_s):
            if may_stop() or self._session.generation != generation:
                if not has_ended(work, _STUCK_AFTER_S):
                    connection.abandon()
                return
        work.wait()
        reached = (generation << _BOUNDARY_BITS) + int(lowest)
        self._session.board.announce(self._first, Field.ALL_NODES_AT, reached)

    def _connected_in(self, generation: int, may_stop: Callable[[], bool], look_again_s: float) -> Connection | None:
        """The connection of this generation, made once all first ranks have come here; None if the wait has ended."""
        if self._connection is not None and self._connection.generation == generation:
            return self._connection
        session, exchange = self._session, self._session[Exchange]
        number = self._firsts.index(session.rank)
        if self._announced_in != generation:
            self._announced_in = generation
            exchange.put(generation, f"{_GROUP}: {number}", b"")
        for other in range(len(self._firsts)):
            while True:
                if may_stop():
                    return None
                with contextlib.suppress(TimeoutError):
                    exchange.get(generation, f"{_GROUP}: {other}", look_again_s)
                    break
        self._connection = Connection(exchange, generation, _GROUP, number, len(self._firsts), _NO_LIMIT)
        return self._connection

    def _await_next(self, generation: int, boundary: int, error: Exception, may_stop: Callable[[], bool]) -> None:
        """Wait for the recovery that must follow; report the broken connection if none comes by itself."""
        session = self._session
        began_s = time.monotonic()
        while session.generation == generation and not (may_stop() or self.is_past(boundary)):
            if time.monotonic() - began_s > REPORT_AFTER_S and self._reported_in != generation:
                self._reported_in = generation
                session.report_broken(generation, f"the commit between nodes: {error}", REPORT_AFTER_S)
            with session.changed:
                session.changed.wait(REPORT_AFTER_S / 4)

    def cut(self) -> None:
        """A recovery begins: what is under way fails. The recovery thread calls this."""
        self._copies.cut()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
