"""What a rank waits for before its optimizer steps: its own operations, and every rank's record of the boundary.

That is the commit: no rank steps before all have written their records. Begin with `commit`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttprun.groups.collectives import Message
from ttprun.groups.connection import Exchange, GenerationOverError, GivenUpError
from ttprun.groups.gloo import Connection
from ttprun.groups.journal import REPORT_AFTER_S, EndedError, Journal, has_ended
from ttprun.introspect.costs import COMMIT, measured
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import waits_for_recovery
from ttprun.protocol import patience
from ttprun.protocol.board import FINISHED, Board, Field, Phase
from ttprun.protocol.patience import Patience
from ttprun.protocol.reason import Reason
from ttprun.rank.step.copies import Copies

# The commit over nodes: all ranks have recorded the boundary, and each record has a copy on another node.
#
# Inside a node the board says who has recorded what, and of which boundary it keeps a copy of another node's record
# (COPIED, see `copies.py`). Of two nodes each knows by that what the other has recorded. Of more, the first ranks
# reduce the lowest boundary over a small gloo group of their own, whose cost grows with the logarithm of the number
# of nodes. The first rank writes the result to the board of its node (ALL_NODES_AT). Both hold in one generation
# only: after a recovery all nodes commit anew, since a replacement records anew. Begin with `InterNodeCommit.wait`.

_NO_LIMIT = timedelta(days=365)  # a rank may evaluate for hours while the others wait before their step
_STUCK_AFTER_S = 2.0  # after a cut; an operation that can end does so within milliseconds
_BOUNDARY_BITS = 40
_GROUP = "ttprun's first ranks of all nodes"


class InterNodeCommit:
    """This rank's part in it: the first rank of its node reduces, the others wait for what it writes."""

    def __init__(self, session: Rank, copies_fd: int) -> None:
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


# Before a step, wait for the operations that the script has issued and not waited for.
#
# A message whose other end belongs to a later step would never come: the other rank waits before its step for this
# one's record. Protection ends then, and the script goes on as under torchrun.

_ARRIVES_WITHIN_S = 2.0  # what the other end has completed


def wait_for_all(session: Rank, boundary: int) -> None:
    """Wait until the journal's entries have completed, but those of saves; returns early when protection ends."""
    for entry in session.parts[Journal].unfinished():
        if entry.save is not None:  # it may wait for the disk of another rank
            continue
        if isinstance(entry, Message):
            session.touch(Phase.COMMITTING)
            session.parts[Journal].wait(entry, _Wait(session, entry, boundary).is_over)
        else:
            session.touch(Phase.WAITING)
            session.parts[Journal].wait(entry)
    if session.keeper is not None:
        session.keeper.gather()


class _Wait:
    """How long a message is waited for, once the other end's rank has come to the same step."""

    def __init__(self, session: Rank, message: Message, boundary: int) -> None:
        self._session = session
        self._message = message
        self._boundary = boundary
        self._limit_s = 0.0
        self._patience: Patience | None = None
        sender, receiver = message.members
        self._other = receiver if message.op == "send" else sender

    def is_over(self) -> bool:
        """Asked now and then while the message has not completed; if so, protection has ended."""
        session = self._session
        limit_s = self._due_s()
        if limit_s is None or session.is_holding:
            self._patience = None
        elif self._patience is None or limit_s != self._limit_s:
            self._limit_s, self._patience = limit_s, Patience(limit_s)
        elif self._patience.look():
            what = "to" if self._message.op == "send" else "from"
            session.give_up_protection(
                Reason(
                    "messages-not-repaired",
                    f"the script's {self._message.op} {what} rank {self._other} is still pending at optimizer step "
                    f"{self._boundary}, which rank {self._other} has reached too: messages are repaired if they are "
                    "sent and received in the same step (wait for its handle before the optimizer's step)",
                )
            )
        return bool(session.unprotected)

    def _due_s(self) -> float | None:
        """How long the message may take from now on; None: the other rank may not have issued its end yet."""
        session, other = self._session, self._other
        if other == session.rank or session.board.get(other, Field.RECORDED) >= self._boundary:
            return _ARRIVES_WITHIN_S
        is_there = session.board.get(other, Field.PHASE) == Phase.COMMITTING
        is_same_step = session.board.get(other, Field.APPLIED) == self._boundary - 1
        return session.options.commit_timeout_s if is_there and is_same_step else None


_LOOK_AGAIN_S = 1.0


@measured(COMMIT)
@waits_for_recovery
def commit(
    session: Rank, boundary: int, check_held: Callable[[], None] = lambda: None, look_again_s: float = _LOOK_AGAIN_S
) -> None:
    """Wait until every rank of the job has recorded the boundary; a rank that trains alone waits for none.

    check_held   called now and then while a recovery holds this rank; its exception ends the wait

    Raises EndedError if this process is ordered to end meanwhile.

    The wait has no deadline: a late rank would hold up the others in the next collective anyhow. But if that rank waits
    in a collective itself, the ranks do not step together, and protection ends after commit_timeout_s.
    """
    while True:
        with session.lock:
            if session.is_holding and session.settle_at < boundary and not session.unprotected:
                session.touch(Phase.COMMITTING)
                check_held()
                if session[Journal].is_ended:
                    raise EndedError
                session.changed.wait(look_again_s)
                continue
            if session.trains_alone or _is_past(session, boundary) or _is_free(session, boundary):
                session.begin_update()
                return
        session.touch(Phase.COMMITTING)
        _wait_for_records(session, boundary, check_held, look_again_s)
        if (commit := session.get(InterNodeCommit)) is not None:
            _commit_over_nodes(session, commit, boundary, check_held, look_again_s)


def _is_past(session: Rank, boundary: int) -> bool:
    """Whether all ranks have recorded the boundary."""
    commit = session.parts.get(InterNodeCommit)
    return min(session.recorded) >= boundary and (commit is None or commit.is_past(boundary))


def _commit_over_nodes(
    session: Rank, commit: InterNodeCommit, boundary: int, check_held: Callable[[], None], look_again_s: float
) -> None:
    """All ranks of this node have recorded the boundary: wait for the other nodes."""
    awaited = Awaited(session, boundary)
    board = session.board
    others = [row for row in range(board.n_ranks) if row not in session.rows_here]

    def may_stop() -> bool:
        if session.is_holding:
            check_held()
        late = next((row for row in others if board.get(row, Field.RECORDED) < boundary), None)
        if late is not None:
            awaited.look(late)
        return _is_free(session, boundary) or session.is_holding

    if not _is_free(session, boundary) and not session.is_holding:
        commit.wait(boundary, may_stop, look_again_s)


def _wait_for_records(session: Rank, boundary: int, check_held: Callable[[], None], look_again_s: float) -> None:
    board = session.board
    awaited = Awaited(session, boundary)
    for row in session.rows_here:
        while (recorded := board.get(row, Field.RECORDED)) < boundary:
            if _is_free(session, boundary):
                return
            if session.is_holding:
                check_held()
            awaited.look(row)
            board.wait_for_change(row, Field.RECORDED, recorded, look_again_s)


class Awaited:
    """How long a rank that is waited for has been waiting in a collective itself: protection ends if it is too long."""

    def __init__(self, session: Rank, boundary: int) -> None:
        self._session = session
        self._boundary = boundary
        self._row = -1
        self._at: tuple[int, int, int] = (0, 0, 0)
        self._pulse = 0
        self._stuck: patience.Patience | None = None

    def look(self, row: int) -> None:
        """Called for the rank that is waited for, a wait apart."""
        session, board = self._session, self._session.board
        at, pulse = _where(board, row), board.get(row, Field.PULSE_NS)
        is_known, is_alive = row == self._row, pulse != self._pulse
        is_working = at[0] not in (Phase.COLLECTIVE, Phase.WAITING) or at != self._at
        self._row, self._at, self._pulse = row, at, pulse
        is_elsewhere = not is_known or is_working or session.is_holding
        if is_elsewhere or (at[0] == Phase.COLLECTIVE and board.get(row, Field.NONE_IN_FLIGHT)):
            self._stuck = None
        elif not is_alive:
            return  # a stopped process does not update its row; the agent's search for hangs will find it
        elif self._stuck is None:
            self._stuck = patience.Patience(session.options.commit_timeout_s)
        elif self._stuck.look():
            session.give_up_protection(
                Reason(
                    "unequal-steps",
                    f"rank {session.rank} steps its optimizer (step {self._boundary}) while rank {row} waits in a "
                    "collective: the ranks do not step together",
                )
            )


def _is_free(session: Rank, boundary: int) -> bool:
    """Whether this rank may step though others have not recorded the boundary."""
    return bool(session.unprotected) or session[Journal].is_ended or session.settle_at >= boundary


def _where(board: Board, row: int) -> tuple[int, int, int]:
    """A rank's phase, its number of collectives, and its heartbeats, which advance as long as it runs bytecode.

    DDP waits in C++, where the phase does not change. In Phase.WAITING the bytecode is that of our own waiting loop.
    """
    phase = board.get(row, Field.PHASE)
    beats = 0 if phase == Phase.WAITING else board.get(row, Field.MAIN_BEATS)
    return phase, board.get(row, Field.COLLECTIVES), beats
