"""A scheduler's say in recovery, where one rank has registered its callbacks (`--mindio`).

It is told what happens, in MindIO's words, and what it asks for becomes an event of the state machine. Nobody waits for
its answers. Begin with `Scheduler.notified`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.board import Field

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor
    from ttprun.channel import Message

_MEMORY, _PROCESS, _LINK = 0, 1, 2  # kinds of faults
_DONE, _RETRY_FAILED, _ONLY_DUMP, _ONLY_EXIT = 0, 405, 406, 499  # results


class Scheduler:
    """The scheduler that the ranks of a supervisor have.

    rank        in whose process it lives; None: there is none
    is_paused   all ranks wait between two steps, because it has asked for that
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.begin_group()

    def begin_group(self) -> None:
        """All ranks are new."""
        self.rank: int | None = None
        self.is_paused = False
        self._pause_ends_s: float | None = None
        self._told = ""
        self._strategy = ""

    # What it asks for.

    def notified(self, message: Message) -> None:
        """It has asked for something."""
        supervisor = self._supervisor
        supervisor.log("scheduler_notified", what=message["what"], ranks=message.get("ranks"))
        match message["what"]:
            case "stop":
                for rank, kind in message["ranks"].items():
                    self._lose(int(rank), int(kind))
            case "pause":
                self._pause(message["timeout_s"])
            case "continue":
                self._continue()
            case "dump" | "exit":
                reason = f"the scheduler has asked for it ({message['what']})"
                supervisor.advance(recovery.StopAsked(at_s=time.monotonic(), reason=reason))

    def _lose(self, rank: int, kind: int) -> None:
        """It says that a rank has failed; what is known already is no news."""
        supervisor = self._supervisor
        if rank not in supervisor.job.survivors:
            return
        seat = supervisor.seats[rank]
        if kind == _MEMORY:
            seat.tell({"op": "uce", "generation": supervisor.job.generation})
            return
        supervisor.advance(
            recovery.RankHung(
                at_s=time.monotonic(),
                rank=rank,
                pid=seat.pid,
                boundary=supervisor.board.get(seat.local_rank, Field.RECORDED),
                reason="the scheduler says that it has failed",
            )
        )

    def _pause(self, timeout_s: float | None) -> None:
        supervisor = self._supervisor
        if self.is_paused or supervisor.job.phase is not recovery.Phase.RUNNING:
            return
        self.is_paused = True
        self._pause_ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        step = max(supervisor.board.get(seat.local_rank, Field.APPLIED) for seat in supervisor.seats) + 1
        self._tell_all({"op": "pause", "step": step, "raises": False})

    def _continue(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._tell_all({"op": "pause", "step": None, "raises": False})

    def _tell_all(self, message: Message) -> None:
        for seat in self._supervisor.seats:
            if seat.is_present:
                seat.tell(message)

    def look(self) -> None:
        """End a pause that has lasted long enough."""
        if self._pause_ends_s is not None and time.monotonic() > self._pause_ends_s:
            self._pause_ends_s = None
            self._continue()

    # What it is told.

    def register(self, seat: Seat) -> None:
        """It lives in the process of this rank."""
        self.rank = seat.rank

    def note_incident(self, incident: recovery.Incident) -> None:
        """How an incident stands."""
        self.is_paused = False
        ranks = {rank: _kind_of(incident.kind) for rank in incident.ranks}
        key = f"{incident.id} {incident.generation} {incident.phase} {incident.outcome}"
        if key == self._told:
            return
        self._told = key
        if incident.outcome == "open" and incident.phase == recovery.Phase.FREEZING:
            self._strategy = {"rerun": "retry", "reconnect": "retry"}.get(incident.rung, "recover")
            self._report("report_fault_ranks", ranks, dict.fromkeys(ranks, ""))
        elif incident.outcome == "open" and incident.phase in (recovery.Phase.REPLAYING, recovery.Phase.PERSISTING):
            self._report("report_stop_complete", _DONE, "stopped", ranks)
            if incident.phase == recovery.Phase.PERSISTING:
                self._strategy = "dump"
            self._report("report_strategies", ranks, [self._strategy, "dump", "exit"])
        elif incident.outcome != "open":
            failed = {"retry": _RETRY_FAILED, "recover": _ONLY_DUMP}.get(self._strategy, _ONLY_EXIT)
            code = _DONE if incident.outcome == "recovered" else failed
            self._report("report_result", code, incident.reason, ranks, self._strategy)

    def _report(self, action: str, *arguments: Any) -> None:
        if self.rank is not None and self._supervisor.seats[self.rank].is_present:
            message = {"op": "scheduler_call", "action": action, "arguments": list(arguments)}
            self._supervisor.seats[self.rank].tell(message)


def _kind_of(kind: str) -> int:
    if kind.startswith("memory-"):
        return _MEMORY
    return _LINK if kind in ("connection", "link", "remote-suspect") else _PROCESS
