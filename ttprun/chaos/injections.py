"""The injected faults of this run: those ordered, those armed in ranks, and those that have struck.

Orders come from the configuration and from `ttprun inject-fault`; `injected_faults.strikes` expands them into
strikes. A strike waits in a rank for its moment; a signal without a moment is sent from here. The events are
fault_ordered, fault_armed, fault_injected and fault_failed. Runs on the supervisor's thread. Begin with `order`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttprun.agent.base.ground import FaultInjection
from ttprun.agent.node.rank_processes import kill_session
from ttprun.chaos.injected_faults import (
    AGENT_KINDS,
    Fault,
    PlannedStrike,
    check_ranks,
    parse_fault,
    seconds_of,
    strikes,
)
from ttprun.protocol import from_rank, node_messages, to_rank
from ttprun.protocol.board import FINISHED, Field

if TYPE_CHECKING:
    from ttprun.agent.between.agent import Agent
    from ttprun.agent.lead.rows import Row
    from ttprun.agent.node.node import Process
    from ttprun.agent.node.standbys import Standbys

_STALL_S = 2.0
_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}


@dataclass
class FaultSchedule:
    """One order.

    number      from 1
    ordered_s   monotonic time of the order
    left        remaining strikes
    """

    number: int
    fault: Fault
    ordered_s: float
    left: Iterator[PlannedStrike]


class Injections(FaultInjection):
    """Carries out the orders for the ranks of a node."""

    def __init__(self, node: Agent, standbys: Standbys) -> None:
        self._node = node
        self._standbys = standbys
        self._from_config = node.config.faults
        self._numbers = itertools.count(1)
        self._order_numbers = itertools.count(1)
        self._armed: dict[int, tuple[Fault, FaultSchedule]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._preempted: Process | None = None

    def begin(self) -> None:
        """The ranks of the first group have been started: take the configuration's orders."""
        for fault in self._from_config:
            try:
                self.order(fault, "configuration")
            except ValueError as error:
                rank = parse_fault(fault).rank
                self._node.log("fault_failed", number=None, rank=rank, fault=fault, reason=str(error))
        self._from_config = []

    def check(self, fault: str) -> None:
        """Raise ValueError if nothing is called so."""
        parse_fault(fault)

    def order(self, fault: str, by: str) -> str:
        """Take an order; returns the answer for the user. Raises ValueError if it cannot be carried out."""
        return self._order(parse_fault(fault), by)

    def _order(self, fault: Fault, by: str) -> str:
        self._check(fault)
        now, coming = time.monotonic(), strikes(fault, len(self._node.slots), self._running_step())
        order = FaultSchedule(next(self._order_numbers), fault, now, coming)
        self._node.log("fault_ordered", order=order.number, fault=str(fault), by=by)
        return self._take_next(order)

    def waiting_in(self, rank: int) -> list[to_rank.InjectedFault]:
        """The faults for a process of that rank when it starts."""
        return [
            to_rank.InjectedFault(number, str(fault))
            for number, (fault, _) in self._armed.items()
            if _rank_of(fault) == rank
        ]

    def greeted(self, slot: Row) -> None:
        """A process reads messages now: send the faults armed since its welcome. It ignores duplicates."""
        for message in self.waiting_in(slot.rank):
            slot.send_if_present(message)

    def forked(self, slot: Process) -> None:
        """A replacement has been started, and has not said a word yet: strike it if a fault waits for that."""
        for number, (fault, order) in list(self._armed.items()):
            is_due = fault.phase == "fork" and _rank_of(fault) == slot.rank and (fault.step or 0) <= slot.lost_boundary
            if is_due:
                del self._armed[number]
                self._log_strike(number, fault, slot, "", phase="fork", step=None, at_s=time.monotonic())
                self._signal(slot, fault)
                self._after(order)
                return

    def struck(self, slot: Row, message: from_rank.FaultStruck) -> None:
        """A rank reports that a fault has struck it; the agent carries out some kinds at this moment."""
        if message.number not in self._armed:
            return
        fault, order = self._armed.pop(message.number)
        when = {"phase": message.phase, "step": message.step, "at_s": message.at_s}
        self._log_strike(message.number, fault, slot, message.detail, **when)
        if fault.kind in ("term", "stop", *AGENT_KINDS):
            self._strike(message.number, fault, slot, is_reported=True)
        self._after(order)

    def answered(self) -> None:
        """The ranks know of the job's end: release the one that waits for that."""
        if self._preempted is not None:
            self._preempted.handler.channel.send(to_rank.FaultDone())
            self._preempted = None

    def failed(self, slot: Row, message: from_rank.FaultFailed) -> None:
        """A rank reports that it could not cause a fault."""
        if message.number in self._armed:
            fault, order = self._armed.pop(message.number)
            self._log_failure(message.number, fault, message.reason, rank=slot.rank)
            self._after(order)

    def next_timer_s(self) -> float | None:
        """The next time for `pass_time`, in monotonic seconds."""
        return self._timers[0][0] if self._timers else None

    def pass_time(self) -> None:
        """Carry out the timers that are due."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    # Orders.

    def _check(self, fault: Fault) -> None:
        check_ranks(fault, len(self._node.slots))
        if fault.step is not None and fault.step < self._running_step():
            raise ValueError(f"step {fault.step} is over, step {self._running_step()} runs; name a later one")

    def _running_step(self) -> int:
        """The highest optimizer step that a rank is in."""
        steps = (self._node.board.get(slot.rank, Field.APPLIED) for slot in self._node.slots)
        return max((step for step in steps if step < FINISHED), default=0)

    def _take_next(self, order: FaultSchedule) -> str:
        """Arm the order's next strike, or set a timer for it; returns what was done."""
        strike = next(order.left, None)
        if strike is None:
            return "nothing is scheduled"
        if strike.after_s is None:
            return self._arm(order, strike.fault)

        def is_time() -> None:
            self._arm(order, strike.fault)
            self._take_next(order)

        self._call_at(order.ordered_s + strike.after_s, is_time)
        return f"ordered: {order.fault}; it begins {strike.after_s:g} s after the order"

    def _after(self, order: FaultSchedule) -> None:
        """A strike has struck: take the next one, unless it has a timer."""
        if order.fault.after is None and seconds_of(order.fault.every) is None:
            self._take_next(order)

    def _arm(self, order: FaultSchedule, fault: Fault) -> str:
        number = next(self._numbers)
        slot = None if fault.rank is None else self._node.slots[fault.rank]
        is_there = slot is None or (slot.is_present and not slot.is_lost and not slot.is_finished)
        if fault.is_immediate and is_there:
            return self._strike_now(number, order, fault, slot)
        self._armed[number] = (fault, order)
        rank = _rank_of(fault)
        self._node.log("fault_armed", number=number, order=order.number, rank=rank, fault=str(fault))
        self._node.slots[rank].send_if_present(to_rank.InjectedFault(number, str(fault)))
        return f"armed in rank {rank}: {fault}"

    # Strikes from outside.

    def _strike_now(self, number: int, order: FaultSchedule, fault: Fault, slot: Row | None) -> str:
        self._log_strike(number, fault, slot, "", phase=None, step=None, at_s=time.monotonic())
        if slot is None:
            done = self._strike_agent(number, fault)
        else:
            self._strike(number, fault, slot, is_reported=False)
            done = f"done to rank {slot.rank} (pid {slot.pid}): {fault}"
        self._after(order)
        return done

    def _strike(self, number: int, fault: Fault, slot: Row, is_reported: bool) -> None:
        strike = node_messages.Strike(slot.rank, slot.pid, number, str(fault), is_reported)
        self._node.order(slot.rank, strike)

    def strike_here(self, strike: node_messages.Strike) -> None:
        """Have a fault strike this node. A rank that has reported it has stopped itself, or waits."""
        fault, slot = parse_fault(strike.fault), self._node.process(strike.rank)
        if fault.kind in AGENT_KINDS:
            self._strike_agent(strike.number, fault)
        elif slot.pid == strike.pid and fault.kind == "stop" and strike.is_reported:
            self._wake_later(slot.pid, fault)
        elif slot.pid == strike.pid:
            self._signal(slot, fault)
        if fault.kind == "preempt" and strike.is_reported:
            self._preempted = slot  # it waits until the signal has been answered
        elif fault.kind != "stop" and strike.is_reported:
            slot.handler.channel.send(to_rank.FaultDone())

    def _signal(self, slot: Process, fault: Fault) -> None:
        if fault.kind == "kill":
            kill_session(slot.pid)
            return
        with contextlib.suppress(OSError):
            if fault.kind in ("segv", "abort"):  # an injected crash writes no core file
                _, hard = resource.prlimit(slot.pid, resource.RLIMIT_CORE)
                resource.prlimit(slot.pid, resource.RLIMIT_CORE, (0, hard))
            os.kill(slot.pid, _SIGNALS[fault.kind])
        if fault.kind == "stop":
            self._wake_later(slot.pid, fault)

    def _strike_agent(self, number: int, fault: Fault) -> str:
        if fault.kind == "agent-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
            return "the launcher was sent SIGTERM"
        if fault.kind == "stall":
            time.sleep(_STALL_S if fault.seconds is None else fault.seconds)
            return "the agent stood still"
        pid = self._standbys.kill_one()
        if pid is None:
            self._log_failure(number, fault, "no standby is there")
            return "there is no standby to kill"
        return f"a standby (pid {pid}) was killed"

    def _wake_later(self, pid: int, fault: Fault) -> None:
        """Continue a stopped process, if the fault has a duration."""

        def wake() -> None:
            if any(slot.pid == pid for slot in self._node.here):  # against pid reuse
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

        if fault.seconds is not None:
            self._call_at(time.monotonic() + fault.seconds, wake)

    def _call_at(self, at_s: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (at_s, next(self._timer_numbers), function))

    # Events.

    def _log_strike(self, number: int, fault: Fault, slot: Process | Row | None, detail: str, **fields: object) -> None:
        self._node.log(
            "fault_injected",
            number=number,
            rank=None if slot is None else slot.rank,
            pid=None if slot is None else slot.pid,
            fault=str(fault),
            kind=fault.kind,
            generation=self._node.generation,
            detail=detail,
            **fields,
        )

    def _log_failure(self, number: int, fault: Fault, reason: str, rank: int | None = None) -> None:
        self._node.log("fault_failed", number=number, rank=rank, fault=str(fault), kind=fault.kind, reason=reason)


def _rank_of(fault: Fault) -> int:
    """The rank in which a fault waits for its moment."""
    return fault.rank if fault.rank is not None else 0
