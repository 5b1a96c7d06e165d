"""A scheduler's say in recovery, where one rank has registered its callbacks (`--mindio`).

It hears what happens, in MindIO's words, and what it asks for becomes an event of the state machine, or a pause of all
ranks between two steps, asked for on the board (`ttprun.mindio.handlers`). Nobody waits for its answers.
Begin with `Scheduler.notified`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ttprun import recovery
from ttprun.agent.lead.rows import Lead, Row
from ttprun.protocol import mindio
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.mindio import SchedulerAsked
from ttprun.protocol.rank_events import StopAsked


class Pause:
    """The pause of a node's ranks; at most one at a time."""

    def __init__(self, node: Lead) -> None:
        self._node = node
        self._number = 0
        self._reset()

    def _reset(self) -> None:
        """Nobody waits."""
        self.is_asked = False
        self._ends_s: float | None = None
        self._waiting: set[int] = set()
        self._given_up: Callable[[], None] = lambda: None
        self._then: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """All ranks wait."""
        return self.is_asked and len(self._waiting) == len(self._node.slots)

    def begin(self, limit_s: float, given_up: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Have all ranks wait behind their next step.

        limit_s    seconds after which they go on by themselves
        given_up   called when they have
        then       called once all wait, and begins something that has deadlines of its own
        """
        self._reset()
        self.is_asked, self._given_up, self._then = True, given_up, then
        self._number += 1
        self._ends_s = time.monotonic() + limit_s
        board = self._node.board
        board.set(LEADER, Field.PAUSE_AT, 0)
        board.set(LEADER, Field.PAUSE_ASKED, self._number)

    def end(self) -> None:
        """Let the ranks go on; nothing happens if none was asked to wait."""
        if self.is_asked:
            self._reset()
            self._node.board.set(LEADER, Field.PAUSE_ASKED, 0)

    def take(self, slot: Row, number: int) -> None:
        """A rank waits."""
        if not self.is_asked or number != self._number:
            return
        self._waiting.add(slot.rank)
        if self.is_complete and self._then is not None:
            then, self._then, self._ends_s = self._then, None, None
            then()

    def look(self) -> None:
        """End a pause that has lasted long enough."""
        if self._ends_s is not None and time.monotonic() > self._ends_s:
            given_up = self._given_up
            self.end()
            given_up()


logger = logging.getLogger("ttprun")

_MEMORY, _PROCESS, _LINK = 0, 1, 2  # kinds of faults
_DONE, _CHOSEN, _NOT_NOW, _RETRY_FAILED, _ONLY_DUMP, _ONLY_EXIT = 0, 201, 404, 405, 406, 499  # results
PLANNED, UPGRADE = recovery.ReplacementAsked.kind, recovery.UpgradeAsked.kind
# What the handlers of a downgrade or upgrade are given, as MindCluster says it.
_PARAMS = {"downgrade": '{"scale-in-strategy": "DP"}', "upgrade": '{"scale-out-strategy": "DP"}'}


class Scheduler:
    """The scheduler of the ranks.

    rank        in whose process it lives; None: there is none
    pause       all ranks wait between two steps, because it has asked for that
    switched    ranks whose healthy processes give their places to new ones, in the recovery that goes on
    """

    def __init__(self, node: Lead, why_not_repairable: Callable[[Sequence[int]], str]) -> None:
        """`why_not_repairable` says why some ranks' state could not be given to new processes; "" if it could."""
        self._node = node
        self._why_not_repairable = why_not_repairable
        self.pause = Pause(node)
        self.rank: int | None = None
        self.switched: tuple[int, ...] = ()
        self._to_switch: tuple[int, ...] = ()
        self._notified = ""
        self._strategy = ""
        self._params = dict(_PARAMS)

    def params(self, strategy: str) -> str:
        """What the handlers of a downgrade or upgrade are given."""
        return self._params[strategy]

    @property
    def is_paused(self) -> bool:
        """Nobody is expected to get on."""
        return self.pause.is_complete and self._node.job.phase is recovery.JobPhase.RUNNING

    # What it asks for.

    def notified(self, message: SchedulerAsked) -> None:
        """It has asked for something."""
        node = self._node
        node.log("scheduler_notified", what=message.what, ranks=message.ranks)
        match message.what:
            case "stop":
                for rank, kind in message.ranks.items():
                    self._lose(rank, kind)
            case "pause":
                is_possible = not node.job.away and node.job.phase is recovery.JobPhase.RUNNING
                if not self.pause.is_asked and is_possible:
                    self._pause(message.timeout_s)
            case "continue":
                self.pause.end()
            case "hot switch":
                self._prepare_switch(tuple(sorted(message.ranks)))
            case "stop switch":
                self._drop_switch("the scheduler has withdrawn it (stop switch)")
            case "downgrade" | "upgrade":
                self._resize(message.what, message.params)
            case "dump" | "exit":
                reason = f"the scheduler has asked for it ({message.what})"
                node.advance(StopAsked(at_s=time.monotonic(), reason=reason))

    def _pause(self, asked_s: float | None) -> None:
        limit_s = self._node.config.pause_timeout_s if asked_s is None else asked_s

        def given_up() -> None:
            whose = "pause_timeout_s" if asked_s is None else "as the scheduler has asked"
            reason = f"the pause lasted {limit_s:g} s ({whose}): the ranks train again"
            self._node.log("pause_ended", reason=reason)
            logger.warning("%s", reason)

        self.pause.begin(limit_s, given_up)

    def _lose(self, rank: int, kind: int) -> None:
        """It says that a rank has failed; what is known already changes nothing."""
        node = self._node
        if rank not in node.job.survivors:
            return
        slot = node.slots[rank]
        if kind == _MEMORY:
            slot.send(mindio.FailMemory(node.job.generation))
            return
        node.advance(
            recovery.RankHung(
                at_s=time.monotonic(),
                rank=rank,
                pid=slot.pid,
                boundary=node.board.get(slot.rank, Field.RECORDED),
                reason="the scheduler reports that it failed",
            )
        )

    def _resize(self, strategy: str, params: str) -> None:
        """The group is to become smaller, as the recovery that goes on, or whole again."""
        self._params[strategy] = params or _PARAMS[strategy]
        reason = f"the scheduler has asked for it ({strategy})"
        if strategy == "downgrade":
            self._node.advance(recovery.DowngradeAsked(at_s=time.monotonic(), reason=reason))
            return
        why_not = self.call_back(reason)
        if why_not:
            logger.warning("no rank is called back: %s", why_not)
            self._report("report_result", _NOT_NOW, why_not, {}, strategy)

    def call_back(self, reason: str) -> str:
        """Have the ranks that are away train again; returns why they cannot, "" if they are on their way.

        reason   who has asked
        """
        node = self._node
        why_not = str(recovery.why_not_upgradable(node.job)) or self._why_too_late()
        if why_not:
            node.log("upgrade_refused", reason=why_not)
        else:
            node.advance(recovery.UpgradeAsked(at_s=time.monotonic(), reason=reason))
        return why_not

    def _why_too_late(self) -> str:
        """Why the ranks cannot be brought to one step any more; "" if they can."""
        board = self._node.board
        is_over = any(board.get(slot.rank, Field.LEAVING) for slot in self._node.slots)
        return "a rank has reached the end of its train function" if is_over else ""

    # A hot switch: all finish their step, and then the ranks that it has named are replaced.

    def _prepare_switch(self, ranks: tuple[int, ...]) -> None:
        why_not = self._why_no_switch(ranks)
        if why_not:
            self._refuse_switch(ranks, why_not)
            return
        self._to_switch = ranks
        limit_s = self._node.config.freeze_timeout_s
        late = f"the ranks did not all pass one step within {limit_s:g} s (freeze_timeout_s)"
        self.pause.begin(limit_s, given_up=lambda: self._drop_switch(late), then=self._switch)

    def _why_no_switch(self, ranks: tuple[int, ...]) -> str:
        """Why these ranks cannot be replaced while they are healthy; "" if they can."""
        if self.pause.is_asked:
            return "the ranks are paused, or about to be"
        if self._node.job.away:
            return "some ranks are away"
        return str(recovery.why_not_replaceable(self._node.job, ranks)) or self._why_not_repairable(ranks)

    def _switch(self) -> None:
        """All ranks wait behind one step."""
        ranks, self._to_switch = self._to_switch, ()
        why_not = str(recovery.why_not_replaceable(self._node.job, ranks))
        if why_not:
            self.pause.end()
            self._refuse_switch(ranks, why_not)
            return
        self.switched = ranks
        reason = "the scheduler has asked for a hot switch"
        self._node.advance(recovery.ReplacementAsked(at_s=time.monotonic(), ranks=ranks, reason=reason))

    def _drop_switch(self, why: str) -> None:
        """It is not to be, if it has not begun."""
        if self._to_switch:
            ranks, self._to_switch = self._to_switch, ()
            self.pause.end()
            self._refuse_switch(ranks, why)

    def _refuse_switch(self, ranks: tuple[int, ...], why: str) -> None:
        self._node.log("switch_refused", ranks=ranks, reason=why)
        logger.warning("no hot switch of rank %s: %s", ", ".join(map(str, ranks)), why)
        self._report("report_result", _NOT_NOW, why, dict.fromkeys(ranks, _PROCESS), "migration")

    # What it hears.

    def register(self, slot: Row) -> None:
        """It lives in the process of this rank."""
        self.rank = slot.rank

    def note_incident(self, incident: recovery.Incident) -> None:
        """How an incident stands."""
        if incident.kind != PLANNED:
            self._drop_switch(f"a fault came first: {incident.reason}")
        ranks = {rank: _kind_of(incident.kind) for rank in incident.ranks}
        key = f"{incident.id} {incident.generation} {incident.phase} {incident.outcome}"
        if key == self._notified:
            return
        self._notified = key
        is_planned, is_persisting = incident.kind == PLANNED, incident.phase == recovery.JobPhase.PERSISTING
        away = self._node.job.away
        if incident.phase == recovery.JobPhase.FREEZING:
            size = "downgrade" if away else "upgrade"
            rung = {"rerun": "retry", "reconnect": "retry", "resize": size}.get(incident.rung, "recover")
            self._strategy = "migration" if is_planned else rung
            if is_planned:
                self._report("report_strategies", ranks, ["migration", "exit"])
            elif incident.kind != UPGRADE:
                self._report("report_fault_ranks", ranks, dict.fromkeys(ranks, ""))
            if rung == "downgrade":
                self._report("report_result", _CHOSEN, "these ranks leave", dict.fromkeys(away, _PROCESS), rung)
        elif is_persisting or (incident.phase == recovery.JobPhase.REPLAYING and not is_planned):
            self._report("report_stop_complete", _DONE, "stopped", ranks)
            self._strategy = "dump" if is_persisting else self._strategy
            lost = self._node.job.lost
            can_shrink = bool(lost) and not recovery.why_not_without(self._node.job, lost)
            others = ["downgrade"] if can_shrink and not is_persisting else []
            self._report("report_strategies", ranks, [self._strategy, *others, "dump", "exit"])
        elif incident.outcome != "open":
            self.switched = ()
            failed = {"retry": _RETRY_FAILED, "recover": _ONLY_DUMP, "upgrade": _ONLY_DUMP, "downgrade": _ONLY_DUMP}
            is_done = incident.outcome == "recovered" and not (incident.kind == UPGRADE and away)
            code = _DONE if is_done else failed.get(self._strategy, _ONLY_EXIT)
            self._report("report_result", code, str(incident.reason), ranks, self._strategy)

    def _report(self, action: mindio.SchedulerAction, *arguments: Any) -> None:
        if self.rank is not None and self._node.slots[self.rank].is_present:
            self._node.slots[self.rank].send(mindio.SchedulerCall(action, list(arguments)))


def _kind_of(kind: str) -> int:
    if kind.startswith("memory-"):
        return _MEMORY
    return _LINK if kind in ("connection", "link", "remote-suspect") else _PROCESS
