"""Watching the processes of ranks and standbys: what they send, the first sign of their end, and the end itself.

Everything that is seen becomes an event of the state machine, or a report (`reports.py`). Begin with `Watch.welcome`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ttprun import recovery
from ttprun.agent import dying
from ttprun.agent.causes import Causes
from ttprun.agent.failures import Failure
from ttprun.agent.preloads import Preloaded
from ttprun.agent.processes import RankHandler, Standby, StandbyHandler, command_of, with_agent
from ttprun.protocol import to_rank
from ttprun.protocol.board import FINISHED, Field

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

STEPLESS_S = 60.0  # from a rank's import of torch; most first steps are done by then


class Watch:
    """Watches the processes that a supervisor looks after, by its selector."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._causes = Causes()
        self._protected_at_s = 0.0

    def welcome(self, seat: Seat, is_replacement: bool) -> None:
        """Tell a process who it is, and listen to it."""
        supervisor = self._supervisor
        config = supervisor.config
        handler, rungs = seat.handler, supervisor.job.settings.rungs
        options = to_rank.Options(
            allow_faults=config.allow_faults,
            keeps_state=not rungs.isdisjoint(("rewind", "persist")),
            own_state=supervisor.own_states.paths_for(seat.local_rank),
            shelves=supervisor.snapshots.paths_for(seat.local_rank),
            snapshot_every_steps=supervisor.snapshots.every_steps,
            record_limit_mib=config.record_limit_mib,
            journal_limit_mib=config.journal_limit_mib,
            commit_timeout_s=config.commit_timeout_s,
            is_replaced="replace" in rungs,
            verify_every=config.verify_every,
            nan_limit_s=config.nan_limit_s,
            user_paths=config.user_paths,
            follow=config.follow,
            may_rerun="rerun" in rungs,
            retry_on=config.retry_on,
            device_errors=config.device_errors,
            simulates_npu=config.simulate_npu,
            mindio=config.mindio,
            prints_traceback=bool(handler.start["stderr"]),
        )
        fds, environment = [supervisor.board_fd, seat.record_fd, seat.stack_fd], {}
        if isinstance(handler, StandbyHandler):
            environment = with_agent(os.environ | handler.start["env"], str(supervisor.run.path))
            fds += handler.outputs()
        welcome = to_rank.Welcome(
            rank=seat.rank,
            local_rank=seat.local_rank,
            world_size=len(supervisor.seats),
            local_world_size=len(supervisor.seats),
            generation=supervisor.job.generation,
            run_dir=str(supervisor.run.path),
            is_replacement=is_replacement,
            had_torch=seat.had_torch,
            options=options,
            arguments=command_of(handler.start) if supervisor.is_python else [],
            faults=supervisor.injections.waiting_in(seat.rank),
            env=environment,
        )
        handler.channel.send(welcome, fds)
        supervisor.selector.register(
            handler.channel.sock, selectors.EVENT_READ, lambda: self._on_message(seat, handler)
        )
        supervisor.selector.register(seat.pidfd, selectors.EVENT_READ, lambda: self._on_exit(seat))
        supervisor.log("rank_started", rank=seat.rank, pid=seat.pid, is_replacement=is_replacement)
        supervisor.advance(recovery.RankStarted(at_s=time.monotonic(), rank=seat.rank, pid=seat.pid))

    def _on_message(self, seat: Seat, handler: RankHandler) -> None:
        try:
            messages = handler.channel.read_available()
        except (EOFError, OSError):
            with contextlib.suppress(KeyError, ValueError):
                self._supervisor.selector.unregister(handler.channel.sock)
            if seat.handler is handler:
                seat.hung_up_at_s = time.monotonic()
            return
        for message in messages:
            if seat.handler is handler:
                self._supervisor.reports.take(seat, message)

    def greeted(self, seat: Seat) -> None:
        """A process has greeted: from now on the first sign of its end is looked out for, too."""
        handler = seat.handler

        def on_dying(code: int) -> None:
            if seat.handler is handler and seat.pidfd >= 0 and code != 0:  # one that finishes is not urgent
                seat.is_dying = True
                self._on_end(seat, code)

        dying.watch(
            self._supervisor.board,
            seat.local_rank,
            seat.pid,
            lambda code: self._supervisor.call(lambda: on_dying(code)),
        )

    def _on_exit(self, seat: Seat) -> None:
        """A process is gone; mostly that is known already."""
        self._supervisor.selector.unregister(seat.pidfd)
        seat.kill()  # what it has started, as long as its number is its own
        was_dying, code = seat.is_dying, seat.bury()
        if not was_dying:
            self._on_end(seat, code)
        self._supervisor.orders.spawn_those_that_wait()

    def _on_end(self, seat: Seat, code: int) -> None:
        supervisor = self._supervisor
        self._drain(seat)
        with contextlib.suppress(KeyError, ValueError):
            supervisor.selector.unregister(seat.handler.channel.sock)
        event = seat.leave(code, supervisor.board, self._causes.of_signal)
        if not seat.is_finished:
            event = replace(event, boundary=supervisor.own_states.reached(seat, event.boundary))
        if seat.is_finished:
            supervisor.board.announce(seat.local_rank, Field.RECORDED, FINISHED)
        else:
            seat.kill()  # its DataLoader workers
            exit_code = -event.signal if event.signal is not None else event.code or 0
            supervisor.unseen.settle(seat)
            failure = Failure(seat.rank, event.pid, exit_code, event.reason, seat.traceback)
            supervisor.first_failure.note(failure, is_new_incident=supervisor.job.incident is None)
        supervisor.log(
            "rank_exited",
            rank=seat.rank,
            pid=event.pid,
            code=event.code,
            signal=event.signal,
            boundary=event.boundary,
            reason=event.reason,
            at_s=event.at_s,
        )
        if not seat.is_finished:
            supervisor.own_states.tell_what_is_left(seat)
        supervisor.advance(event)

    def _drain(self, seat: Seat) -> None:
        """What a process has sent comes before its exit."""
        channel = seat.handler.channel
        with contextlib.suppress(EOFError, OSError):
            channel.sock.setblocking(False)
            while True:
                for message in channel.read_available():
                    self._supervisor.reports.take(seat, message)

    def forget(self, seat: Seat) -> None:
        for watched in (seat.pidfd, seat.handler.channel.sock):
            with contextlib.suppress(KeyError, ValueError):
                self._supervisor.selector.unregister(watched)
        seat.is_dying, seat.spawn = False, None
        if seat.pidfd >= 0:
            os.close(seat.pidfd)
            seat.pidfd = -1

    def refill_standbys(self) -> None:
        """Start the standbys that are missing; without one a lost rank gets a new process."""
        if not self._supervisor.standbys.may_start:
            return
        try:
            self._supervisor.standbys.refill(self._standby, self._supervisor.seats[0].handler.start["env"])
        except OSError as error:
            self._supervisor.log("standby_failed", reason=str(error))

    def start_standbys(self) -> None:
        """The ranks have done their first step, or are not about to: standbys disturb them no longer by their imports.

        Not in an incident, after which the standbys are refilled anyway.
        """
        self._supervisor.standbys.may_start = True
        if self._supervisor.job.incident is None:
            self.refill_standbys()

    def look(self) -> None:
        """Start the standbys of ranks that take no step for long: by hand, not at all, or after a long set-up."""
        supervisor = self._supervisor
        if supervisor.job.incident is None:
            supervisor.standbys.look(self._preloaded)
        if supervisor.standbys.may_start or not all(seat.is_protected for seat in supervisor.seats):
            return
        if self._protected_at_s == 0.0:
            self._protected_at_s = time.monotonic()
        elif time.monotonic() - self._protected_at_s > STEPLESS_S:
            self.start_standbys()

    def _preloaded(self, preloaded: Preloaded) -> None:
        supervisor, began_s = self._supervisor, time.monotonic()
        preloads, pid = supervisor.standbys.preloads, preloaded.process.pid

        def on_message() -> None:
            try:
                preloaded.read()
            except (EOFError, OSError):
                with contextlib.suppress(KeyError, ValueError):
                    supervisor.selector.unregister(preloaded.channel.sock)
                preloads.lost(preloaded)
                return
            is_usable = preloads.came(preloaded)
            told = {"is_usable": is_usable, "refused": preloaded.refused or preloads.refused}
            supervisor.log("standby_preloaded", pid=pid, took_s=time.monotonic() - began_s, **told)

        supervisor.selector.register(preloaded.channel.sock, selectors.EVENT_READ, on_message)

    def _standby(self, standby: Standby) -> None:
        supervisor = self._supervisor

        def on_message() -> None:
            try:
                standby.read()
            except (EOFError, OSError):
                supervisor.selector.unregister(standby.channel.sock)
                supervisor.log("standby_lost", pid=standby.process.pid, was_ready=standby.has_started)
                standby.bury()
                if not standby.is_ready:
                    supervisor.standbys.forget_warmth()
                if standby.has_started:  # one that could not start would not start the next time either
                    self.refill_standbys()
            supervisor.orders.spawn_those_that_wait()

        supervisor.selector.register(standby.channel.sock, selectors.EVENT_READ, on_message)
