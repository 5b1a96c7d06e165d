"""Before a step, wait for the operations that the script has issued and not waited for.

A message whose other end belongs to a later step would never come: the other rank waits before its step for this one's
record. Protection ends then, and the script goes on as under torchrun.
"""

from __future__ import annotations

from ttprun.groups.journal import Journal
from ttprun.groups.messages import Message
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.patience import Patience
from ttprun.protocol.reason import Reason
from ttprun.rank.session import Session

_ARRIVES_WITHIN_S = 2.0  # what the other end has completed


def wait_for_all(session: Session, boundary: int) -> None:
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


class _Wait:
    """How long a message is waited for, once the other end's rank has come to the same step."""

    def __init__(self, session: Session, message: Message, boundary: int) -> None:
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
