"""A scheduler's say in recovery, where one rank has registered its callbacks (`--mindio`).

It is told what happens, in MindIO's words, and what it asks for becomes an event of the state machine. Nobody waits for
its answers. Begin with `Scheduler.notified`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent.pauses import Pause
from ttprun.board import Field

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor
    from ttprun.channel import Message

logger = logging.getLogger("ttprun")

_MEMORY, _PROCESS, _LINK = 0, 1, 2  # kinds of faults
_DONE, _NOT_NOW, _RETRY_FAILED, _ONLY_DUMP, _ONLY_EXIT = 0, 404, 405, 406, 499  # results
PLANNED = recovery.ReplacementAsked.kind


class Scheduler:
    """The scheduler that the ranks of a supervisor have.

    rank        in whose process it lives; None: there is none
    pause       all ranks wait between two steps, because it has asked for that
    switched    ranks whose healthy processes give their places to new ones, in the recovery that goes on
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.pause = Pause(supervisor)
        self.begin_group()

    def begin_group(self) -> None:
        """All ranks are new."""
        self.rank: int | None = None
        self.pause.begin_group()
        self.switched: tuple[int, ...] = ()
        self._to_switch: tuple[int, ...] = ()
        self._told = ""
        self._strategy = ""

    @property
    def is_paused(self) -> bool:
        """Nobody is expected to get on."""
        return self.pause.is_complete and self._supervisor.job.phase is recovery.Phase.RUNNING

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
                if not self.pause.is_asked and supervisor.job.phase is recovery.Phase.RUNNING:
                    self.pause.begin(message["timeout_s"])
            case "continue":
                self.pause.end()
            case "hot switch":
                self._prepare_switch(tuple(sorted(map(int, message["ranks"]))))
            case "stop switch":
                self._drop_switch("the scheduler has taken it back (stop switch)")
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

    # A hot switch: all finish their step, and then the ranks that it has named are replaced.

    def _prepare_switch(self, ranks: tuple[int, ...]) -> None:
        why_not = self._why_no_switch(ranks)
        if why_not:
            self._refuse_switch(ranks, why_not)
            return
        self._to_switch = ranks
        self.pause.begin(None, self._switch)

    def _why_no_switch(self, ranks: tuple[int, ...]) -> str:
        """Why these ranks cannot be replaced while they are healthy; "" if they can."""
        if self.pause.is_asked:
            return "the ranks are paused, or about to be"
        frameworks = self._supervisor.frameworks
        return recovery.why_not_replaceable(self._supervisor.job, ranks) or frameworks.why_not_repairable(ranks)

    def _switch(self) -> None:
        """All ranks wait behind one step."""
        ranks, self._to_switch = self._to_switch, ()
        why_not = recovery.why_not_replaceable(self._supervisor.job, ranks)
        if why_not:
            self.pause.end()
            self._refuse_switch(ranks, why_not)
            return
        self.switched = ranks
        reason = "the scheduler has asked for a hot switch"
        self._supervisor.advance(recovery.ReplacementAsked(at_s=time.monotonic(), ranks=ranks, reason=reason))

    def _drop_switch(self, why: str) -> None:
        """It is not to be, if it has not begun."""
        if self._to_switch:
            ranks, self._to_switch = self._to_switch, ()
            self.pause.end()
            self._refuse_switch(ranks, why)

    def _refuse_switch(self, ranks: tuple[int, ...], why: str) -> None:
        self._supervisor.log("switch_refused", ranks=ranks, reason=why)
        logger.warning("no hot switch of rank %s: %s", ", ".join(map(str, ranks)), why)
        self._report("report_result", _NOT_NOW, why, dict.fromkeys(ranks, _PROCESS), "migration")

    # What it is told.

    def register(self, seat: Seat) -> None:
        """It lives in the process of this rank."""
        self.rank = seat.rank

    def note_incident(self, incident: recovery.Incident) -> None:
        """How an incident stands."""
        if incident.kind != PLANNED:
            self._drop_switch(f"a fault came first: {incident.reason}")
        ranks = {rank: _kind_of(incident.kind) for rank in incident.ranks}
        key = f"{incident.id} {incident.generation} {incident.phase} {incident.outcome}"
        if key == self._told:
            return
        self._told = key
        is_planned, is_persisting = incident.kind == PLANNED, incident.phase == recovery.Phase.PERSISTING
        if incident.phase == recovery.Phase.FREEZING:
            rung = {"rerun": "retry", "reconnect": "retry"}.get(incident.rung, "recover")
            self._strategy = "migration" if is_planned else rung
            if is_planned:
                self._report("report_strategies", ranks, ["migration", "exit"])
            else:
                self._report("report_fault_ranks", ranks, dict.fromkeys(ranks, ""))
        elif is_persisting or (incident.phase == recovery.Phase.REPLAYING and not is_planned):
            self._report("report_stop_complete", _DONE, "stopped", ranks)
            self._strategy = "dump" if is_persisting else self._strategy
            self._report("report_strategies", ranks, [self._strategy, "dump", "exit"])
        elif incident.outcome != "open":
            self.switched = ()
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
