"""The supervisor: a thread of the agent that notices what happens to ranks and carries out what the machine decides.

It waits on one selector: exits (`dying.py`, and pidfds), messages of ranks (`reports.py`), the control socket, and
deadlines. Everything that happens becomes an event of `ttprun.recovery`; the actions that come back are carried out by
`orders.py`. If the supervisor itself breaks, the job goes on as under torchrun.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ttprun import recovery
from ttprun.agent import requests, stacks
from ttprun.agent.checkpoints import Checkpoints
from ttprun.agent.comparisons import Comparisons
from ttprun.agent.control import ControlSocket
from ttprun.agent.failures import FirstFailure
from ttprun.agent.frameworks import Frameworks
from ttprun.agent.lookout import EVERY_S as LOOK_EVERY_S
from ttprun.agent.lookout import Lookout
from ttprun.agent.orders import Orders
from ttprun.agent.own_state import OwnStates
from ttprun.agent.processes import RankHandler
from ttprun.agent.repairs import Repairs
from ttprun.agent.replays import Replays
from ttprun.agent.reports import Reports
from ttprun.agent.resume import Resumption
from ttprun.agent.seat import Seat
from ttprun.agent.snapshots import Snapshots
from ttprun.agent.standbys import Standbys
from ttprun.agent.standing import Standing
from ttprun.agent.status import StatusPublisher
from ttprun.agent.unseen import Unseen
from ttprun.agent.verdict import Verdict
from ttprun.agent.watch import Watch
from ttprun.chaos.injections import Injections
from ttprun.config import Config
from ttprun.observe.events import EventLog
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.board import FIELDS, LEADER, Board, Field
from ttprun.rank.records.recorder import Recorder
from ttprun.state.store import CheckpointStore

logger = logging.getLogger("ttprun")
_STATUS_EVERY_S = 0.5
_LOOK_AGAIN_S = 1.0


class Supervisor:
    """Supervises the ranks of one node.

    verdict    set when the present group must be restarted, has failed or is done; None while it lives
    resumption opens checkpoints to go on from
    is_broken  it has failed: nothing is decided any more, and the job goes on as under torchrun
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        world_size: int,
        is_python: bool,
        max_restarts: int,
        store: CheckpointStore,
        resumption: Resumption,
    ) -> None:
        """`resumption` is asked at once from what a new launch goes on; raises ConfigError as its `find` does."""
        self.config = config
        self.verdict: Verdict | None = None
        self._is_settled = threading.Event()  # there is a verdict, or nobody who would come to one
        self.is_python = is_python
        self.run = run
        self.first_failure = FirstFailure()
        self._events = EventLog(run.events)
        self._log_lock = threading.Lock()
        self.selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._deadlines: list[tuple[float, int, int, str, int | None]] = []
        self._count = itertools.count()
        self._board: Board | None = None
        self.board_fd = -1
        self.seats: list[Seat] = []
        self.replace_handler: Callable[[int, RankHandler], None] = lambda local_rank, handler: None
        self.injections = Injections(self, config.faults)
        self.orders = Orders(self)
        self.comparisons = Comparisons(self)
        self.reports = Reports(self)
        self.watch = Watch(self)
        self.repairs: Repairs = Frameworks(self) if config.mindio else Replays(self)
        self.lookout = Lookout(self)
        self.snapshots = Snapshots(self)
        self.own_states = OwnStates(self)
        self.checkpoints = Checkpoints(self, store)
        self.standing = Standing(self)
        self.unseen = Unseen(self)
        self.resumption = resumption
        self._resume_from = resumption.find() if is_python else ()
        self._is_stopping = False
        self._is_paused = False
        self.is_broken = False
        self._is_deciding = False
        self._undecided: deque[recovery.Event] = deque()
        limits = recovery.Limits(
            freeze_s=config.freeze_timeout_s,
            replay_s=config.replay_timeout_s,
            transfer_s=config.transfer_timeout_s,
            resume_s=config.resume_timeout_s,
            persist_s=config.persist_timeout_s,
            # Whoever must come to its next collective to quiesce needs more time.
            halt_s=config.freeze_timeout_s if config.mindio else recovery.Limits().halt_s,
        )
        rungs = config.without_repair() if not is_python else config if world_size > 1 else config.for_one_rank()
        settings = recovery.Settings(
            world_size=world_size,
            is_alone=world_size == 1 and is_python and not config.mindio,
            rungs=frozenset(rungs.rungs),
            max_incidents_per_hour=config.max_incidents_per_hour,
            max_restarts=max_restarts,
            saves_before_restart=config.mindio,
            begins_anew=not resumption.is_named,
            same_command_goes_on=resumption.is_found_by_same_command,
            are_replicas_declared=config.mindio,
            limits=limits,
        )
        self.job = recovery.new_job(settings)
        is_replaced = "replace" in settings.rungs or (config.mindio and "resize" in settings.rungs)
        self.standbys = Standbys(config.standbys if is_replaced else 0, str(run.path), config.follow)
        self.status = StatusPublisher(run, config, world_size)
        self._thread = threading.Thread(target=self._loop, name="ttprun-supervisor", daemon=True)

    # Called from torch's agent, on the main thread.

    def start(self) -> None:
        """Begin to supervise; no rank is there yet."""
        self.selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._control = ControlSocket(self.run, lambda request: requests.answer(self, request), self.selector)
        self._thread.start()

    def begin_group(self, ranks: list[tuple[int, int]], replace_handler: Callable[[int, RankHandler], None]) -> None:
        """A group of ranks is about to be started: `ranks` is (global rank, local rank) of each."""
        for seat in self.seats:
            os.close(seat.record_fd)
            os.close(seat.stack_fd)
        if self.board_fd >= 0:
            os.close(self.board_fd)
        self.board_fd, self._board = Board.create(len(ranks))
        slot_bytes = self.config.record_limit_mib << 20
        unsat: Any = None
        self.seats = [Seat(rank, local, unsat, Recorder.create(slot_bytes), stacks.create()) for rank, local in ranks]
        self.lookout.begin_group()
        self.snapshots.begin_group(len(ranks))
        self.own_states.begin_group(len(ranks))
        self.comparisons.begin_group(len(ranks))
        self.reports.begin_group()
        self.repairs.begin_group()
        self.replace_handler = replace_handler
        self.verdict = None
        self._is_settled.clear()
        self.first_failure = FirstFailure()

    def sit(self, local_rank: int, handler: RankHandler) -> None:
        """The first process of a rank has been started."""
        self.seats[local_rank].sit(handler)

    def group_started(self, is_restart: bool) -> None:
        """All processes of the group have been started."""
        self.call(lambda: self._begin(is_restart))

    def _begin(self, is_restart: bool) -> None:
        """Welcome all ranks. They wait for that, so they are also welcomed if something breaks here."""
        resume_from, self._resume_from = self._resume_from, ()
        is_resumed = bool(resume_from) and not self.is_broken
        try:
            self._is_paused = False
            if is_restart:
                self.standbys.preloads.begin_group()
                self.advance(recovery.GroupRestarted(at_s=time.monotonic()))
            self._is_paused = self.is_broken
            if is_resumed:
                where = self.resumption.opened(resume_from[0].place)
                self.log("checkpoint_found", boundary=where.boundary, place=where.place, took_s=where.checked_s)
                event = recovery.ResumeAsked(at_s=time.monotonic(), saved=resume_from, replicas=where.replicas)
                self.advance(event)
                self.comparisons.begin_resumed(where.replicas)
            self.injections.begin()
            for seat in self.seats:
                self.watch.welcome(seat, is_replacement=is_resumed)
        except Exception as error:
            self._is_paused = True  # nobody decides any more
            if is_resumed:  # then nobody would tell them where to go on
                self.resumption.note_unusable(resume_from[0].place, repr(error), is_refused=True)
                why = f"the run cannot resume from the checkpoint: {error!r}; the next launch will not try it again"
                self.conclude(Verdict("fail", why, has_progress=False))
                raise
            for seat in self.seats:
                if seat.handler.channel.sock not in self.selector.get_map():
                    self.watch.welcome(seat, is_replacement=False)
            raise

    def end(self, reason: str, grace_s: float) -> None:
        """The user or the scheduler ends the job, whatever goes on; returns when its state is saved, or cannot be.

        grace_s   seconds that the ranks have afterwards to end by themselves
        """
        self.log("ending", reason=reason, grace_s=grace_s)

        def stop() -> None:
            def order() -> None:
                self.advance(recovery.StopAsked(at_s=time.monotonic(), reason=reason))

            self.standing.ask(order, is_end=True)
            self.injections.answered()
            if self._is_paused:  # nobody decides: the ranks are being ended or started, or we have broken
                self._is_settled.set()

        self.call(stop)
        # Every phase of saving has its deadline, and a second signal ends the ranks.
        while not self._is_settled.wait(_LOOK_AGAIN_S) and self._thread.is_alive():
            pass

    def pause(self) -> None:
        """The group is about to be ended on purpose: exits are no faults from now on."""
        done = threading.Event()

        def pause() -> None:
            self._is_paused = True
            self._is_settled.set()
            for seat in self.seats:
                self.watch.forget(seat)
            done.set()

        self.call(pause)
        done.wait(10)

    def note_end_asked(self) -> None:
        """The launcher has got a signal that ends the job; a signal handler calls it.

        Ranks that have got it too, from a scheduler that signals all processes, do not die of it before `end` is over.
        """
        if self._board is not None:
            self._board.set(LEADER, Field.END_ASKED, 1)

    def announce_signal(self, number: int) -> None:
        """All ranks are about to get this signal from the agent, on behalf of who has sent it to the launcher."""
        if self._board is not None:
            self._board.set(LEADER, Field.ENDED_BY, number)

    def end_ranks_at_once(self) -> None:
        """SIGKILL to all ranks and all that they have started; a signal handler may call it at any moment."""
        for seat in self.seats:
            seat.kill()

    def stop(self, exit_code: int, reason: str = "") -> None:
        """End the thread, the standbys, and whatever a rank has left behind."""
        self._is_stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(10)
        self.standbys.end()
        for seat in self.seats:
            seat.kill()
        self._control.close()
        self.checkpoints.end(is_done=exit_code == 0)
        self.status.end(self, exit_code, reason)
        self.log("run_ended", exit_code=exit_code, reason=reason)

    # The loop.

    def call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"x")

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while not self._calls.empty():
            self._calls.get()()

    def _loop(self) -> None:
        while not self._is_stopping:
            now = time.monotonic()
            wait_s = _STATUS_EVERY_S if self.lookout.is_off else LOOK_EVERY_S
            next_timer_s = self.injections.next_timer_s()
            if self._deadlines:
                wait_s = min(wait_s, max(0.0, self._deadlines[0][0] - now))
            if next_timer_s is not None:
                wait_s = min(wait_s, max(0.0, next_timer_s - now))
            try:
                for key, _ in self.selector.select(wait_s):
                    if self.selector.get_map().get(key.fd) is key:  # not what has got the number of one just closed
                        key.data()
                self._pass_deadlines()
                self._control.pass_time()
                self._send_what_was_kept()
                self.injections.pass_time()
                if self.verdict is None and not self._is_paused and self._board is not None:
                    self.repairs.look()
                    self.unseen.look()
                    self.lookout.look()
                    self.watch.look()
                    self.snapshots.look()
                    self.checkpoints.look()
                    self.standing.look()
                self.status.publish(self)
            except Exception as error:
                logger.exception("ttprun's supervisor failed; from here on the job runs as under torchrun")
                self.log("supervisor_failed", error=repr(error))
                self.is_broken = self._is_paused = True
                self._is_settled.set()
                self._wake()  # for the calls behind one that has failed
            if self.is_broken and self.verdict is None:
                self._conclude_from_processes()

    def _send_what_was_kept(self) -> None:
        """To ranks that had no room for it: one that stands still reads nothing, and nobody waits for it."""
        for seat in self.seats:
            if seat.handler is not None:
                seat.handler.channel.flush()

    def _conclude_from_processes(self) -> None:
        seats = [seat for seat in self.seats if seat.rank not in self.job.away]
        if not seats or any(seat.handler is None for seat in seats):
            return  # torch's agent has not started all of them yet
        codes = [seat.handler.proc.poll() for seat in seats]
        if any(codes):
            self.conclude(Verdict("restart", "a rank has failed and ttprun cannot repair it"))
        elif all(code == 0 for code in codes):
            self.conclude(Verdict("done"))

    def conclude(self, verdict: Verdict) -> None:
        """This group has come to its end; torch's agent asks for the verdict."""
        self.verdict = verdict
        self._is_settled.set()

    def _pass_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            at_s, _, generation, name, rank = heapq.heappop(self._deadlines)
            is_of_all = rank is None and generation == self.job.generation
            silent = self.lookout.silent_ranks() if is_of_all else ()
            self.advance(recovery.DeadlinePassed(at_s=at_s, generation=generation, name=name, silent=silent, rank=rank))

    # Decisions, and what they order.

    def advance(self, event: recovery.Event) -> None:
        """Let the machine decide; what its actions bring about is decided after they are all carried out."""
        self._undecided.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        try:
            while self._undecided and not self._is_paused:
                self._decide(self._undecided.popleft())
        finally:
            self._is_deciding = False
            self._undecided.clear()

    def _decide(self, event: recovery.Event) -> None:
        before = self.job
        self.job, actions = recovery.advance(self.job, event)
        if self.job.phase is not before.phase:
            self.log(
                "phase_changed",
                generation=self.job.generation,
                incident=self.job.incident.id if self.job.incident else before.incident.id if before.incident else None,
                before=str(before.phase),
                after=str(self.job.phase),
                cause=type(event).__name__,
            )
        for action in actions:
            self.orders.carry_out(action)

    def set_deadline(self, generation: int, name: str, after_s: float, rank: int | None = None) -> None:
        """Let the machine know when so many seconds have passed.

        rank   see recovery.SetDeadline
        """
        heapq.heappush(self._deadlines, (time.monotonic() + after_s, next(self._count), generation, name, rank))

    @property
    def board(self) -> Board:
        """The page on which the ranks note how far they are; only once a group has been begun."""
        assert self._board is not None
        return self._board

    def board_row(self, seat: Seat) -> list[int]:
        """A rank's row of the board."""
        return [self.board.get(seat.local_rank, field) for field in FIELDS]

    def log(self, event: str, **fields: object) -> None:
        """Append to the event log."""
        with self._log_lock:
            self._events.append(event, **{"at_s": time.monotonic()} | fields)
