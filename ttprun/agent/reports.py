"""What ranks tell the agent: passed on, noted, or made into events of the state machine. Begin with `Reports.take`."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.board import Field
from ttprun.channel import Message

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

logger = logging.getLogger("ttprun")

_REPORTS: dict[str, Any] = {
    "frozen": recovery.RankFrozen,
    "replayed": recovery.RankReplayed,
    "state_sent": recovery.StateSent,
    "repaired": recovery.RankRepaired,
    "rebuilt": recovery.RankRebuilt,
    "reissued": recovery.RankReissued,
    "mismatch": recovery.MismatchFound,
}


class Reports:
    """Takes the messages of the ranks that a supervisor looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def take(self, seat: Seat, message: Message) -> None:
        """A message has come from the process of a seat."""
        op = message["op"]
        if op == "put":
            seat.told_in = message["generation"]
            for other in self._supervisor.seats:
                if other is not seat:
                    other.pass_on(message)
        elif op == "ready":
            pass  # a standby that was needed before it was ready
        elif op == "modules":
            self._supervisor.standbys.warm_up(message["modules"])
        elif op == "present":
            seat.main_thread = message["main_thread"]
            seat.greet()
            self._supervisor.injections.greeted(seat)
        elif op == "broken":
            self._supervisor.lookout.take_broken(seat, message)
        elif op == "script_error":
            if message["traceback"] and not any(other.script_error for other in self._supervisor.seats):
                os.write(2, message["traceback"].encode())
            seat.script_error = message["error"]
        elif op == "fault_struck":
            self._supervisor.injections.struck(seat, message)
        elif op == "fault_failed":
            self._supervisor.injections.failed(seat, message)
        elif op == "note":
            self._supervisor.log("note", rank=seat.rank, text=message["text"])
            logger.warning("rank %d: %s", seat.rank, message["text"])
        else:
            self._on_report(seat, op, message)

    def _on_report(self, seat: Seat, op: str, message: Message) -> None:
        """A message that is an event of the state machine."""
        fields: dict[str, Any] = {"at_s": time.monotonic(), "rank": seat.rank}
        if op == "unprotected":
            self._supervisor.log("rank_unprotected", rank=seat.rank, reason=message["reason"])
            for other in self._supervisor.seats:
                if other is not seat:
                    other.tell({"op": "unprotected", "reason": message["reason"]})
            self._supervisor.advance(recovery.RankUnprotected(**fields, reason=message["reason"]))
            return
        if op == "protected":
            seat.is_protected = True
            self._supervisor.advance(recovery.RankProtected(**fields))
            return
        fields["generation"] = message["generation"]
        if op == "frozen":
            seat.journal = message["journal"]
            self._reset_lost_rows(seat, message["boundary"])
            fields |= {key: message[key] for key in ("boundary", "digest", "has_group")}
        elif op == "replayed":
            fields["boundary"] = message["boundary"]
        elif op in ("state_sent", "repaired"):
            fields["digest"] = message["digest"]
        elif op == "mismatch":
            fields["reason"] = message["reason"]
            if message.get("detail"):
                self._supervisor.log("mismatch_detail", rank=seat.rank, detail=message["detail"])
        self._supervisor.advance(_REPORTS[op](**fields))

    def _reset_lost_rows(self, seat: Seat, boundary: int) -> None:
        """What a lost rank had recorded beyond the boundary is void: survivors wait for its replacement's record."""
        board = self._supervisor.board
        for other in self._supervisor.seats:
            if other.lost_boundary > boundary:
                other.lost_lines = self._supervisor.orders.lines_to_skip(other, boundary)
                other.lost_boundary = boundary
                board.set(other.local_rank, Field.RECORDED, boundary)
                board.set(other.local_rank, Field.LINES_OUT, other.lost_lines[0])
                board.set(other.local_rank, Field.LINES_ERR, other.lost_lines[1])
