"""The main thread's side: the decorated train function, and how it is interrupted and called again.

The recovery thread (`callback_recovery.py`) orders this object to stop and to resume; the main thread notices in its
next collective, before its next update of the optimizer, or in a wait. Read `Framework.run` first.

A scheduler may take part in recovery (MindCluster's taskd): its callbacks get the agent's reports of faults
(`notify`), and it sends requests; both use the rank's channel. The agent decides by itself and never waits for one.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, cast, get_args

from ttprun.device import accelerator
from ttprun.device.device_errors import DeviceFault, in_one_line
from ttprun.groups.journal import REPORT_AFTER_S, Journal
from ttprun.groups.operations import Entry
from ttprun.groups.work import ManagedWork, Refused
from ttprun.introspect import stages
from ttprun.introspect.current_rank import JOINING, Rank, current
from ttprun.mindio import handlers
from ttprun.mindio.handlers import (
    ARF_FINISH,
    FORCE_STOP,
    RET_ERROR,
    RET_OK,
    STEP_FINISH,
    Action,
    Elastic,
    ErrorTable,
    Handlers,
    Pauses,
    ReportState,
)
from ttprun.protocol import from_rank, mindio
from ttprun.protocol.board import FINISHED, Field, Phase
from ttprun.protocol.patience import Patience
from ttprun.rank.replay.order_thread import JoinsTraining
from ttprun.rank.step import step_hooks
from ttprun.rank.step.commit_barrier import commit

_LOOK_AGAIN_S = 0.1
_ORDER_LIMIT_S = 30.0  # for the agent's order after a fault that this rank has reported or noticed


class MainThread(Enum):
    """Where the main thread is."""

    OUTSIDE = "outside the train function"
    TRAINING = "in the train function"
    WAITING = "in the decorator, for a repair"


class Framework:
    """The state of this rank's framework, and the functions that the framework calls.

    joins_at       boundary at which a replacement joins; None in a rank that was there from the start
    reboot_type    of a replacement: "arf" for a lost process, "hot switch" for a healthy one
    is_stopping    the main thread is to leave its train function
    settled_in     generation in which all ranks have last agreed on their step
    is_past_setup  the train function has been called; a replacement repeats what the script does before
    device_index   number of the device on which it works; None: on the CPU
    fault          the state that this rank has reported since it last trained
    repair_type    "retry", "recover", "dump" or "unknow"
    repair_step    step from which all resume; 0: unknown
    was_cleaned    stop and clean are over
    is_torn        an update of the optimizer has begun and not ended
    has_uce        a scheduler reports that memory of this rank's device has failed
    loaded_step    of a checkpoint that a repair handler has loaded; 0: none
    """

    def __init__(self, session: Rank, joins_at: int | None, reboot_type: str = "arf") -> None:
        self._session = session
        self.joins_at = joins_at
        if joins_at is not None:
            session.stand_in(JOINING)
        self.was_rebooted = self.is_joining
        self.reboot_type = reboot_type
        self.is_stopping = self.is_past_setup = self.was_cleaned = self.is_torn = self.has_uce = False
        self.settled_in = -1
        self.place = MainThread.OUTSIDE
        self.device_index: int | None = None
        self.fault = ReportState.RS_NORMAL
        self.repair_type: mindio.Strategy = "unknow"
        self.repair_step = joins_at or 0
        self.times = session.updates
        self.errors = ErrorTable(self.times)
        self.handlers = Handlers()
        self.elastic = Elastic(session, self.handlers)
        self.loaded_step = 0
        self._pauses = Pauses(session)
        self._callback_thread = 0
        self._check_overtaken: Callable[[], None] = lambda: None

    @property
    def is_joining(self) -> bool:
        """Whether this is a replacement that has not reached its train function: its collectives are skipped."""
        return self._session.mode is JOINING

    # Called by the recovery thread.

    def serve_callbacks(self, check_overtaken: Callable[[], None]) -> None:
        """The calling thread runs callbacks from now on: it may communicate while others must stop.

        check_overtaken   raises if a newer recovery has begun
        """
        self._callback_thread = threading.get_ident()
        self._check_overtaken = check_overtaken

    def order_stop(self, repair_type: mindio.Strategy | None) -> None:
        """The main thread is to leave its train function; does not wait."""
        with self._session.changed:
            self.is_stopping = True
            self.was_cleaned = False
            self.loaded_step = 0
            self.repair_type = repair_type or "unknow"
            self._session.changed.notify_all()

    def wait_until_stopped(self, check_overtaken: Callable[[], None]) -> None:
        """Block until the main thread waits in the decorator, or `check_overtaken` raises."""
        with self._session.changed:
            while self.place is not MainThread.WAITING:
                self._session.changed.wait(_LOOK_AGAIN_S)
                check_overtaken()

    def note_cleaned(self) -> None:
        """Stop and clean are over."""
        with self._session.changed:
            self.was_cleaned = True
            self._session.changed.notify_all()

    def release(self, step: int) -> None:
        """The repair is over: this rank is at `step`, and its main thread calls the train function again."""
        session = self._session
        with session.changed:
            session.stand_at(step)
            self.repair_step = step
            self.is_stopping = self.is_torn = False
            session.go_on()
            self.fault = ReportState.RS_NORMAL
            self.joins_at = None
            self.loaded_step = 0
            if self.place is MainThread.WAITING:
                self.place = MainThread.TRAINING
            session.changed.notify_all()

    def fail_memory(self) -> None:
        """A scheduler reports that memory of this rank's device has failed: `admit` raises that in the main thread."""
        self.has_uce = True

    # Called by the script's threads.

    def admit(self) -> None:
        """Called before a thread communicates or waits. Raises RuntimeError: FORCE STOP, UCE ERROR or ARF FINISH.

        The thread that runs callbacks passes, unless a newer recovery has begun.
        """
        if threading.get_ident() == self._callback_thread:
            self._check_overtaken()
        elif self.is_stopping and self.place is not MainThread.OUTSIDE:
            raise RuntimeError(f"{FORCE_STOP}. A recovery has begun (ttprun)")
        elif self.has_uce and self.place is MainThread.TRAINING:
            self.has_uce = False
            raise RuntimeError("UCE ERROR. The scheduler reports that this rank's device memory has failed (ttprun)")
        elif self.is_joining and self.place is MainThread.TRAINING:
            raise RuntimeError(f"{ARF_FINISH}. A replacement has reached the train function (ttprun)")

    def may_connect_again(self) -> bool:
        """Whether a thread whose connection has failed may wait for the next generation. Raises as `admit`."""
        self.admit()
        return threading.get_ident() != self._callback_thread

    def issue(self, entry: Entry, is_skipped: bool = False) -> ManagedWork:
        """Issue a collective whose inputs are not kept: one that a recovery interrupts is never issued again.

        is_skipped   an injected fault has this rank skip it

        Raises as `admit`.
        """
        journal = self._session[Journal]
        self.admit()
        if is_skipped or self.is_joining:
            entry.is_done = True
            return ManagedWork(journal, entry)
        entry.group.connect_if_new()
        journal.forget_completed()
        with journal.lock:
            self.admit()
            try:
                entry.inner = entry.group.call(entry.op, entry.args)
            except RuntimeError as error:
                if not self.is_of_connection(error):
                    raise
                entry.inner = Refused(error)  # its wait() waits for a recovery
            journal.entries.append(entry)
        stages.reached("collective")
        return ManagedWork(journal, entry)

    # The optimizer's update.

    def start_updating(self) -> None:
        """The optimizer's state is about to change: wait until every rank is here.

        No rank begins before all are here, so survivors of a fault can reach the same step. Raises RuntimeError (FORCE
        STOP) if a recovery has begun, and this rank need not finish the step.
        """
        session = self._session
        stages.reached("before_step")
        self.admit()
        accelerator.synchronize()  # a collective that fails late must not feed the update
        boundary = session.applied + 1
        handlers.keep(session, boundary)
        self._pauses.agree(boundary)
        session.board.announce(session.rank, Field.RECORDED, boundary)
        commit(session, boundary, self._leave_if_settled, _LOOK_AGAIN_S)
        self.is_torn = True
        session.touch(Phase.STEPPING)
        stages.reached("in_step")

    def _leave_if_settled(self) -> None:
        session = self._session
        with session.changed:
            if self.settled_in == session.generation and session.is_holding and session.settle_at <= session.applied:
                raise RuntimeError(f"{FORCE_STOP}. By mindio-ttp BeginUpdating (ttprun)")

    def end_updating(self, step: int) -> None:
        """The optimizer's state is that of `step` now.

        Raises ValueError if `step` is not after the last one, and the device's error if it has not carried out the
        update: it works later than the calls that ask for it, and may have dropped them.
        """
        session = self._session
        if step <= session.applied:
            raise ValueError(f"tft_end_updating_os: step {step} is not after step {session.applied}")
        accelerator.synchronize()
        stages.reached_step_end()
        is_first = session.applied == 0
        if step != session.applied + 1:  # the framework has resumed from a checkpoint of its own
            handlers.keep(session, step)
        with session.changed:
            session.stand_at(step)
            self.is_torn = False
            session.changed.notify_all()
        session[Journal].forget_completed()
        session.touch(Phase.COMPUTING)
        if is_first:
            step_hooks.report_imports(session)
        stages.reached("after_step")

    # The train function.

    def run(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the train function, and again after each error that a repair answers.

        args   callbacks get this list itself, and may change it for the next call
        """
        self.handlers.args = args
        while True:
            self._enter()
            try:
                result = function(*args, **kwargs)
                self._wait_for_all()
            except RuntimeError as error:
                state = self._state_of(error)
                if not self._report(state, error):
                    self._leave()
                    raise
            except BaseException:
                self._leave()
                raise
            else:
                self._leave()
                return result
            gc.collect()
            self.wait_next_action()
            self.wait_repair_action()
            gc.collect()

    def _enter(self) -> None:
        session = self._session
        with session.changed:
            self.place = MainThread.TRAINING
            self.is_past_setup = True
            self.device_index = accelerator.current_index()
            session.changed.notify_all()
        session.touch(Phase.COMPUTING if session.applied else Phase.SETUP)

    def _leave(self) -> None:
        with self._session.changed:
            self.place = MainThread.OUTSIDE

    def _wait_for_all(self) -> None:
        """After the train function: wait until it is over in every rank, since until then each may be needed to repair
        another. Raises RuntimeError (FORCE STOP) if that happens.
        """
        session = self._session
        self.admit()
        stages.reached("exit")
        board = session.board
        board.announce(session.rank, Field.LEAVING, 1)
        session.touch(Phase.FINISHED)
        for row in range(board.n_ranks):
            while not (leaving := board.get(row, Field.LEAVING)) and board.get(row, Field.RECORDED) != FINISHED:
                board.wait_for_change(row, Field.LEAVING, leaving, _LOOK_AGAIN_S)
                self.admit()

    # Reports.

    def report(self, state: ReportState, error: str) -> None:
        """tft_report_error: report this rank's state. Raises RuntimeError if no recovery answers it."""
        if not self._report(state, RuntimeError(error or state.name)):
            raise RuntimeError(f"{state.name} ({error}): no recovery in this process answers it")

    def _state_of(self, error: RuntimeError) -> ReportState:
        state = self.errors.classify(error)
        is_link = state is ReportState.RS_UNKNOWN and self.is_of_connection(error)
        return ReportState.RS_HCCL_FAILED if is_link else state

    def is_of_connection(self, error: BaseException) -> bool:
        """Whether an error only means that another rank cannot be reached."""
        return self._session.diagnose(error).rung == "reconnect"

    def _report(self, state: ReportState, error: BaseException) -> bool:
        """Report to the agent, and stop; False if no recovery in this process answers the error."""
        session = self._session
        match state:
            case ReportState.RS_NORMAL | ReportState.RS_INIT_FINISH | ReportState.RS_STEP_FINISH:
                if not self._is_recovery_ordered(_ORDER_LIMIT_S):
                    return False
            case ReportState.RS_PREREPAIR_FINISH:
                if not self.is_joining:
                    return False
                session.go_live()
            case ReportState.RS_UCE if session.is_repairable():
                pass
            case ReportState.RS_HCCL_FAILED if session.is_repairable():
                if not self._is_recovery_ordered(REPORT_AFTER_S):
                    session.report_broken(session.generation, in_one_line(error), REPORT_AFTER_S)
                    if not self._is_recovery_ordered(_ORDER_LIMIT_S):
                        return False
            case _:
                return False
        with session.changed:
            self.place = MainThread.WAITING
            self.is_stopping = True
            if state is not ReportState.RS_NORMAL:
                self.fault = state
            session.changed.notify_all()
        session.touch(Phase.REPAIRING)
        if state is ReportState.RS_UCE:
            self._report_fault(error)
        elif state is ReportState.RS_PREREPAIR_FINISH:
            assert session.recovery is not None
            session.recovery.leave_to_thread(JoinsTraining(session.generation))
        return True

    def _report_fault(self, error: BaseException) -> None:
        diagnosis = self._session.diagnose(error)
        device_fault = diagnosis.name if diagnosis.can_stay else str(DeviceFault.MEMORY_PERSISTENT)
        detail = "".join(traceback.format_exception(error))
        self._session.channel.send(
            from_rank.RankFaulted(reason=in_one_line(error), detail=detail, device_fault=device_fault)
        )

    def _is_recovery_ordered(self, limit_s: float) -> bool:
        session = self._session
        patience = Patience(limit_s, session[Journal].is_agent_awake)
        with session.changed:
            while not self.is_stopping and not patience.look():
                session.changed.wait(_LOOK_AGAIN_S)
            return self.is_stopping

    def wait_next_action(self) -> Action:
        """Block until stop and clean are over; EXIT if the state is being saved because the job ends."""
        session = self._session
        with session.changed:
            while not self.was_cleaned and self.place is MainThread.WAITING:
                session.changed.wait(_LOOK_AGAIN_S)
        return Action.EXIT if self.repair_type == "dump" else Action.RETRY

    def wait_repair_action(self) -> Action:
        """Block until the repair is over; if there is none, the agent kills the process."""
        session = self._session
        with session.changed:
            while self.place is MainThread.WAITING:
                session.changed.wait(_LOOK_AGAIN_S)
        return Action.RETRY

    def pause_if_asked(self) -> None:
        """tft_pause_train, once per iteration. Raises RuntimeError: STEP FINISH, or as `admit`."""
        self._pauses.wait(self.handlers.sync_stream, self._admit_between_steps)

    def _admit_between_steps(self) -> None:
        if self.is_stopping:
            raise RuntimeError(f"{STEP_FINISH}. A recovery begins after step {self._session.applied} (ttprun)")
        self.admit()


def has_framework() -> bool:
    """Whether this process is a rank whose framework recovers by callbacks."""
    session = current()
    return session is not None and session.framework is not None


def this_rank() -> tuple[Rank, Framework]:
    """This rank's session and framework. Raises RuntimeError in any other process."""
    session = current()
    framework = session.framework if session is not None else None
    if session is None or not isinstance(framework, Framework):
        raise RuntimeError("mindio_ttp: this process is not a protected rank; start the script with: ttprun --mindio")
    return session, framework


ACTIONS: tuple[str, ...] = get_args(mindio.SchedulerAction)
STRATEGIES: tuple[str, ...] = get_args(mindio.Wish)
STOPS = ("stop", "pause")
SWITCH, NO_SWITCH = "hot switch", "stop switch"

_callbacks: dict[str, Callable[..., Any]] = {}


def register(action: str, function: Callable[..., Any]) -> int:
    """Register a callback; RET_ERROR if there is no such action, or it is not a function.

    action   one of ACTIONS
    """
    if action not in ACTIONS or not callable(function):
        return RET_ERROR
    _callbacks[action] = function
    this_rank()[0].channel.send(mindio.SchedulerRegistered())
    return RET_OK


def call(action: str, arguments: list[Any]) -> None:
    """Pass a report of the agent to its callback, on a thread of its own, since a callback may block.

    action      one of ACTIONS; nothing is done if it has no callback
    arguments   from JSON: keys that are ranks become numbers again
    """
    function = _callbacks.get(action)
    if function is not None:
        with_ranks = [
            {int(rank): value for rank, value in argument.items()} if isinstance(argument, dict) else argument
            for argument in arguments
        ]
        threading.Thread(target=function, args=with_ranks, name="ttprun-scheduler", daemon=True).start()


def prepare(action: str, ranks: Mapping[int, int]) -> int:
    """Request a hot switch of some ranks, or cancel it; RET_ERROR if that is impossible.

    action   SWITCH or NO_SWITCH, which cancels it
    ranks    some, but not all of the job -> kind of fault; not used by NO_SWITCH
    """
    session = this_rank()[0]
    if action == NO_SWITCH:
        return notify(action)
    is_possible = 0 < len(ranks) < session.world_size and all(0 <= rank < session.world_size for rank in ranks)
    return notify(action, ranks=dict(ranks)) if action == SWITCH and is_possible else RET_ERROR


def notify(what: str, ranks: Mapping[int, int] | None = None, timeout_s: float | None = None, params: str = "") -> int:
    """Send a request of the scheduler to the agent; returns RET_OK.

    what                       in MindIO's words, one of `mindio.Asked`
    ranks, timeout_s, params   as in SchedulerAsked
    """
    this_rank()[0].channel.send(mindio.SchedulerAsked(cast(mindio.Asked, what), dict(ranks or {}), timeout_s, params))
    return RET_OK
