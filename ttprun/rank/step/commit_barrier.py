"""The commit: no rank steps its optimizer before all have written their records of the boundary."""

from __future__ import annotations

from collections.abc import Callable

from ttprun.groups.journal import EndedError, Journal
from ttprun.introspect.costs import COMMIT, measured
from ttprun.protocol import patience
from ttprun.protocol.board import Board, Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.rank.session import Session
from ttprun.rank.step.inter_node_commit import InterNodeCommit

_LOOK_AGAIN_S = 1.0


@measured(COMMIT)
def commit(
    session: Session, boundary: int, check_held: Callable[[], None] = lambda: None, look_again_s: float = _LOOK_AGAIN_S
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


def _is_past(session: Session, boundary: int) -> bool:
    """Whether all ranks have recorded the boundary."""
    commit = session.parts.get(InterNodeCommit)
    return min(session.recorded) >= boundary and (commit is None or commit.is_past(boundary))


def _commit_over_nodes(
    session: Session, commit: InterNodeCommit, boundary: int, check_held: Callable[[], None], look_again_s: float
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


def _wait_for_records(session: Session, boundary: int, check_held: Callable[[], None], look_again_s: float) -> None:
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

    def __init__(self, session: Session, boundary: int) -> None:
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


def _is_free(session: Session, boundary: int) -> bool:
    """Whether this rank may step though others have not recorded the boundary."""
    return bool(session.unprotected) or session[Journal].is_ended or session.settle_at >= boundary


def _where(board: Board, row: int) -> tuple[int, int, int]:
    """A rank's phase, its number of collectives, and its heartbeats, which advance as long as it runs bytecode.

    DDP waits in C++, where the phase does not change. In Phase.WAITING the bytecode is that of our own waiting loop.
    """
    phase = board.get(row, Field.PHASE)
    beats = 0 if phase == Phase.WAITING else board.get(row, Field.MAIN_BEATS)
    return phase, board.get(row, Field.COLLECTIVES), beats
