"""A rank's part in a recovery, on a thread of its own, while the main thread waits.

Begin with `Recovery.take`. The agent's orders are in `protocol/to_rank.py`: `Freeze` (a rank is lost: stop before the
next commit, break the connections, report the boundary), `SendState` and `FetchState` (the repair), `LoadState` (from a
snapshot), `Dump` (a checkpoint), `Resume` (connect in the new generation and issue the journal again); what is done for
each: recovery_orders.py. A newer generation interrupts an older one at every wait: what a further loss comes to
meanwhile is decided by the rows of REPLAYING in `ttprun/recovery/machine.py`.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ttprun.device.interface import DeviceFailedError
from ttprun.groups import generations
from ttprun.groups.connection import Exchange, GenerationOverError
from ttprun.groups.journal import REPORT_AFTER_S, Journal
from ttprun.groups.links import abort_all, cut_all
from ttprun.groups.process_group import living
from ttprun.introspect import fail_open
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import from_rank, mindio, rank_events, to_rank
from ttprun.protocol.channel import Message
from ttprun.protocol.reason import Reason
from ttprun.rank import heartbeat, held_signals
from ttprun.rank.proof import Alignment
from ttprun.rank.replay import recovery_orders
from ttprun.rank.verification import Verifier
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.shares import SnapshotPart

# Order -> what has been done with it, and what does it: (session, order, called now and then; its exception ends it).
_ACTS: dict[type, tuple[str, Callable[[Rank, Any, Callable[[], None]], None]]] = {
    to_rank.Freeze: ("stopped", recovery_orders.freeze),
    to_rank.SendState: ("sent its state", recovery_orders.send_state),
    to_rank.FetchState: ("loaded another rank's state", recovery_orders.fetch_state),
    to_rank.SendGradients: ("sent its gradients", recovery_orders.send_gradients),
    to_rank.TakeGradients: ("took another rank's gradients", recovery_orders.take_gradients),
    to_rank.LoadMirror: (
        "loaded the lost rank's mirror",
        lambda session, order, _: recovery_orders.load_mirror(session, order),
    ),
    to_rank.LoadState: ("loaded what was saved", lambda session, order, _: recovery_orders.load_state(session, order)),
    to_rank.Dump: ("wrote its state", lambda session, order, _: recovery_orders.dump(session, order)),
    to_rank.Resume: ("issued the step's collectives again", recovery_orders.resume),
}
# Between ranks that train: if one of these fails, another rank is lost or a connection has broken.
_OF_CONNECTIONS = (to_rank.Resume, mindio.Rollback, to_rank.SendGradients, to_rank.TakeGradients)
_NO_MORE = sys.maxsize  # a generation above all others
RETIRE_LIMIT_S = 30.0  # gloo needs 20 s to give up connecting


class JoinsTraining(NamedTuple):
    """The main thread of a replacement has reached its framework's train function: an order of our own (--mindio)."""

    generation: int


Ordered = to_rank.OfRecovery | mindio.OfRecovery | JoinsTraining


class OvertakenError(RuntimeError):
    """A newer generation has begun: the current order is void."""


class Recovery:
    """Reads the agent's messages and carries them out."""

    def __init__(self, session: Rank) -> None:
        self._session = session
        self._orders: queue.Queue[Ordered | None] = queue.Queue()
        self._newest_generation = session.generation
        self._saved_in = -1  # the generation in which this rank has written its part of a checkpoint
        self._thread = threading.Thread(target=self._work, name="ttprun-recovery", daemon=True)

    def begin_in(self, generation: int) -> None:
        """Before the first message: a freeze may have been answered, and a generation begun, since this was made."""
        self._newest_generation = generation
        self._session.begin_generation(generation)

    def start(self) -> None:
        """Start the working thread, which may block; `take` is called from the reading thread."""
        self._thread.start()

    def retire(self) -> None:
        """The run of the script is over: the current order is void. Does not wait."""
        self._newest_generation = _NO_MORE
        self._orders.put(None)
        self._session[Exchange].end_before(_NO_MORE)

    def join(self, limit_s: float) -> None:
        """After `retire`: wait `limit_s` at most for the thread's end."""
        self._thread.join(limit_s)

    def finish(self) -> None:
        """After `retire`: wait until the thread has ended, and no operation touches a tensor any more.

        Raises TimeoutError after RETIRE_LIMIT_S.
        """
        self._thread.join(generations.LET_FINISH_S)
        if self._thread.is_alive():
            cut_all(group.links for group in generations.all_groups(self._session))
        self._thread.join(RETIRE_LIMIT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the recovery thread has not ended within {RETIRE_LIMIT_S:.0f} s")
        generations.break_connections(self._session)
        generations.settle()  # the script will write to all that its last run has used
        with self._session[Journal].lock:
            self._session[Journal].is_frozen = False
        self._session[Journal].clear()
        for group in generations.all_groups(self._session):
            group.forget_run()

    def take(self, message: Message) -> None:
        """Handle a message: at once if that cannot block, otherwise on the working thread."""
        session = self._session
        match message:
            case from_rank.Put(generation=generation, key=key, value=value):
                session[Exchange].deliver(generation, key, value)
            case from_rank.RankUnprotected(reason=reason):
                session.note_unprotected(reason)
            case to_rank.EndAsked():
                session[Journal].end()
                with session.changed:
                    session.changed.notify_all()
            case to_rank.NotAlike(owners=owners):
                session[SnapshotPart].owners = owners
            case to_rank.DropReduced(may=may):
                session[Journal].may_settle = may
            case to_rank.KeepMirror():
                session[Mirror].want(message)
            case to_rank.AllCompared(boundary=boundary, is_of_step=is_of_step):
                session[Verifier].note_compared(boundary, is_of_step)
            case to_rank.LookAt(boundary=boundary):
                session[Verifier].look_at(boundary)
            case to_rank.GoOn(boundary=boundary):
                session[Alignment].note_aligned(session, boundary)
            case to_rank.StopDivergent():
                session[Verifier].mark_divergent()
            case (
                to_rank.Freeze()
                | to_rank.Replay()
                | to_rank.SendState()
                | to_rank.FetchState()
                | to_rank.SendGradients()
                | to_rank.TakeGradients()
                | to_rank.LoadMirror()
                | to_rank.LoadState()
                | to_rank.Dump()
                | to_rank.Resume()
            ):
                self.leave_to_thread(message)
            case _:
                session.channel.send(from_rank.Note(f"a message from the agent is ignored: {message}"))

    def leave_to_thread(self, order: Ordered) -> None:
        """Queue an order that may block; one of a newer generation interrupts those before it."""
        self._newest_generation = max(self._newest_generation, order.generation)
        if isinstance(order, to_rank.Freeze):
            self._session[Exchange].end_before(order.generation)
            self._session[Verifier].stop_waiting()
            if not self.is_idle(0.0):
                self._free_thread(order.generation)
        self._orders.put(order)

    def _free_thread(self, generation: int) -> None:
        """A newer generation begins while the thread works for an older one. It notices that wherever it waits in
        Python; not in C++, as for a device on which a collective is stuck. So abort what is left of its generation.
        """
        links = [link for group in list(living) for link in group.links.all]
        stuck = [link for link in links if link.is_late and link.generation < generation]

        def abort() -> None:
            with contextlib.suppress(DeviceFailedError):  # the freeze meets it again
                abort_all(stuck)

        if stuck:
            threading.Thread(target=abort, name="ttprun-freeing", daemon=True).start()

    def is_idle(self, limit_s: float) -> bool:
        """Whether all orders are carried out; waits for that, `limit_s` at most."""
        orders = self._orders
        with orders.all_tasks_done:
            return orders.all_tasks_done.wait_for(lambda: not orders.unfinished_tasks, limit_s)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                if order.generation >= self._newest_generation:
                    self._answer(order)
            finally:
                self._orders.task_done()

    def _answer(self, order: Ordered) -> None:
        session = self._session
        try:
            with heartbeat.with_room():
                self._carry_out(order)
        except (OvertakenError, GenerationOverError):
            return
        except DeviceFailedError as error:
            generations.give_up_process(session, error)
        except Exception as error:
            if self._newest_generation > order.generation:
                return
            if session.framework is None and generations.has_failed(session, error):
                generations.give_up_process(session, DeviceFailedError(str(error)))
            is_refusal = isinstance(error, fail_open.NotRepairableError)
            if isinstance(order, _OF_CONNECTIONS) and isinstance(error, RuntimeError | OSError) and not is_refusal:
                # These errors only mean that another rank is lost or a connection has broken.
                if not self._is_overtaken_soon(order.generation):
                    groups = generations.all_groups(session)
                    fault = next(filter(None, (group.links.device_fault_of(error) for group in groups)), "")
                    session.report_broken(order.generation, str(error), REPORT_AFTER_S, fault)
                return
            detail = "" if is_refusal else traceback.format_exc()
            what = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            doing, _ = _ACTS.get(type(order), ("recovered", None))
            reason = Reason.of(error, "recovery-failed").within(f"while it {doing}: {what}")
            session.channel.send(rank_events.MismatchFound(order.generation, reason, detail))

    def _carry_out(self, order: Ordered) -> None:
        if type(order) not in _ACTS:
            raise RuntimeError(f"a rank that trains cannot carry out {order}")
        is_saved = isinstance(order, to_rank.Resume) and order.generation == self._saved_in
        if is_saved and held_signals.is_end_near():
            held_signals.note_saved()
        with generations.enter(self._session):
            _ACTS[type(order)][1](self._session, order, self._check_overtaken)
        if isinstance(order, to_rank.Dump):
            self._saved_in = order.generation

    def _is_overtaken_soon(self, generation: int) -> bool:
        """Whether a newer generation begins within REPORT_AFTER_S, as the agent has noticed the fault itself."""
        give_up_at_s = time.monotonic() + REPORT_AFTER_S
        while self._newest_generation <= generation and time.monotonic() < give_up_at_s:
            time.sleep(recovery_orders.LOOK_AGAIN_S)
        return self._newest_generation > generation

    def _check_overtaken(self) -> None:
        if self._newest_generation > self._session.generation:
            raise OvertakenError
