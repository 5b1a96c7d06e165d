"""The supervisor: a thread of the agent that notices what happens to ranks and carries out what the machine decides.

It waits on one selector: exits (`life_signs.py`, and pidfds), messages of ranks (`reports.py`), the control socket, and
deadlines. Everything that happens becomes an event of `ttprun.recovery`; the actions that come back are carried out by
`coordinator.py`. A part that protection does not need fails by itself (`loop.py`); if anything else breaks, the
supervisor begins anew, and if that does not help the job goes on as under torchrun. Begin with `Supervisor._loop`.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ttprun import recovery
from ttprun.agent.base.ground import Verdict
from ttprun.agent.base.loop import CannotDecideError, FileReserve
from ttprun.agent.base.peers import Peers
from ttprun.agent.between.agent import Agent
from ttprun.agent.launcher.control_socket import ControlSocket
from ttprun.agent.launcher.group import Group, NewGroup, Run
from ttprun.agent.lead.hang_detector import EVERY_S as LOOK_EVERY_S
from ttprun.agent.lead.membership import Elasticity
from ttprun.agent.lead.resume import Resumption, replicas_of, settings_of
from ttprun.agent.node.rank_processes import RankHandler
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.control_requests import Rejected, Reply, Request
from ttprun.protocol.rank_events import Event, StopAsked
from ttprun.recovery.replicas import Replicas
from ttprun.state.store import CheckpointStore

logger = logging.getLogger("ttprun")
_STATUS_EVERY_S = 0.5
_LOOK_AGAIN_S = 1.0
_LOOK_FOR_STANDBY_S = 0.1
_START_LIMIT_S = 60.0
RENEWED_EVERY_S = 60.0
_T = TypeVar("_T")
_LEFT_LIMIT_S = 0.5  # processes that were sent SIGKILL are gone by then


class Supervisor:
    """Supervises the ranks of one node; if its agent leads, it decides for those of all nodes.

    node            what its parts share
    run             what lasts as long as the run
    had_finished    all scripts had come to their ends when a signal was to end the job
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
        elasticity: Elasticity,
    ) -> None:
        """`resumption` says from what a new launch resumes, on one node at once; raises ConfigError as `find` does."""
        settings = settings_of(config, world_size, is_python, max_restarts, resumption)
        self.node = Agent(config, run, is_python, recovery.new_job(settings))
        self._resumption = resumption
        self._resume_from = resumption.find() if is_python and not resumption.is_of_leader else ()
        self._resized: meeting.Regroup | None = None
        self.run = Run(self.node, store, resumption, elasticity)
        self._group: Group | None = None
        self._is_stopping = False
        self._renewed_at_s = -math.inf
        self._why_not_saved = ""
        self._checkpoints_before_end = 0
        self.had_finished = False
        self._reserve = FileReserve()
        self._thread = threading.Thread(target=self._loop, name="ttprun-supervisor", daemon=True)

    @property
    def group(self) -> Group:
        """The present group of ranks; only once one has been begun."""
        assert self._group is not None
        return self._group

    # Called from torch's agent, on the main thread.

    def start(self) -> None:
        """Begin to supervise; no rank is there yet."""
        self._control = ControlSocket(self.node.run, self._answer, self.node.selector)
        self._thread.start()

    def _answer(self, request: Request) -> Reply:
        """Raises ValueError if the request cannot be carried out, of which whoever asked hears."""
        try:
            return self.run.requests.answer(request)
        except (CannotDecideError, ValueError, KeyError):
            raise
        except Exception as error:
            self.node.domains.note("commands", error)
            return Rejected(f"ttprun has failed to answer: {error!r}")

    def begin_group(self, group: NewGroup, peers: Peers | None = None) -> None:
        """A group of ranks is about to be started.

        peers   the agents of the other nodes, if there are any

        Blocks until the supervisor's thread has begun it, _START_LIMIT_S at most. Raises TimeoutError after that, and
        ConfigError as `Resumption.find` does, in the agent that leads several nodes.
        """
        is_leading_first = peers is not None and not peers.is_follower and not self.node.has_board and not self._resized
        if is_leading_first and peers is not None and not peers.without_save_dir and self._resumption.is_of_leader:
            self._resume_from = self._resumption.find()
        self._on_thread(lambda: self._begin_group(group, peers))

    def _begin_group(self, group: NewGroup, peers: Peers | None) -> None:
        if self._group is not None:
            self._group.close()
        self.node.begin_group(group.ranks, peers)
        self._group = Group(self.run, group)

    def _on_thread(self, work: Callable[[], _T]) -> _T:
        """Have the supervisor's thread do this between two looks, as nothing is whole meanwhile, and wait for it.

        Blocks for _START_LIMIT_S at most. Raises TimeoutError after that, and what `work` raises.
        """
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.node.call(run)
        return done.result(_START_LIMIT_S)

    def begin_resized_group(self, group: NewGroup, peers: Peers, order: meeting.Regroup) -> None:
        """A group starts again on other nodes; the number of ranks is another one from now on.

        peers   the agents of the new group's nodes
        order   by which the leader has started it

        Blocks and raises as `begin_group` does.
        """

        def begin() -> None:
            node = self.node
            size = len(group.ranks) * peers.size
            node.job = recovery.with_size(replace(node.job, generation=max(node.generation, order.generation)), size)
            self._resumption.resize(size)
            self._resized = order
            self._begin_group(group, peers)

        self._resume_from = ()
        self._on_thread(begin)

    def wait_for_standby(self, limit_s: float) -> None:
        """Block until a standby is ready, if it is on its way."""
        ends_s = time.monotonic() + limit_s
        standbys = self.run.standbys
        while time.monotonic() < ends_s and not standbys.ready:
            time.sleep(_LOOK_FOR_STANDBY_S)

    def start_from_standby(self, start: dict[str, Any]) -> RankHandler:
        """The first process of a rank whose slot was a lost node's: a standby, or a new one. Raises OSError."""
        return self._on_thread(lambda: self.group.orders.start_process(start))

    def assign(self, local_rank: int, handler: RankHandler) -> None:
        """The first process of a rank has been started."""
        self.node.here[local_rank].assign(handler)

    def group_started(self, is_restart: bool) -> None:
        """All processes of the group have been started."""
        self.node.call(lambda: self._begin(is_restart))

    def _begin(self, is_restart: bool) -> None:
        """Send each rank its Welcome, even if something below fails: ranks block until it comes."""
        node = self.node
        if node.peers.is_follower:
            if not node.is_broken:
                node.is_paused = False
            self._resized = None
            self.group.watch_peers()  # the agent that leads says when
            return
        resume_from, self._resume_from = self._resume_from, ()
        resized, self._resized = self._resized, None
        if resized is not None and resized.place:
            resume_from = (recovery.Saved(resized.boundary, resized.place),)
        blind = ", ".join(map(node.peers.name_of, node.peers.without_save_dir))
        if blind:
            why = f"{blind} does not see the save directory of this node"
            self.group.checkpoints.why_never = why
            logger.warning("no checkpoints: %s; name one that all nodes share (--save-dir)", why)
        is_resumed = bool(resume_from) and not node.is_broken and not blind
        try:
            node.is_paused = False
            if is_restart and resized is None:
                self.node.advance(recovery.GroupRestarted(at_s=time.monotonic()))
            node.is_paused = node.is_broken
            now = time.monotonic()
            if is_resumed:
                where = self._resumption.opened(resume_from[0].place, is_new=resized is not None)
                node.log("checkpoint_found", boundary=where.boundary, place=where.place, took_s=where.checked_s)
                replicas = replicas_of(where)
                event: Event = recovery.ResumeAsked(at_s=now, saved=resume_from, replicas=replicas)
                if resized is not None:
                    event = recovery.GroupResized(
                        at_s=now,
                        saved=resume_from,
                        replicas=replicas,
                        reason=resized.reason,
                        has_grown=self.group.membership.note_newcomers(resized),
                    )
                self.node.advance(event)
                self.group.comparisons.begin_resumed(replicas)
            elif resized is not None:
                self.node.advance(recovery.GroupResized(at_s=now, saved=(), replicas=Replicas(), reason=resized.reason))
            self.run.injections.begin()
            self.group.wire.order_all(node_messages.Begin(node.job.generation, is_resumed))
            self.group.leader.share()
            self.group.watch_peers()
        except Exception as error:
            node.is_paused = True
            if is_resumed:  # then nobody would order them where to resume
                self._resumption.note_unusable(resume_from[0].place, repr(error), is_refused=True)
                why = f"the run cannot resume from the checkpoint: {error!r}; the next launch will not try it again"
                node.conclude(Verdict("fail", why, has_progress=False))
                raise
            for slot in node.here:
                if slot.handler.channel.sock not in node.selector.get_map():
                    self.group.watch.welcome(slot, is_replacement=False)
            raise

    def end(self, ended_by: signal.Signals, grace_s: float, left_s: Callable[[], float]) -> None:
        """The user or the scheduler ends the job, whatever goes on; returns when its state is saved, or cannot be.

        ended_by  what the launcher has got
        grace_s   seconds that the ranks have afterwards to end by themselves
        left_s    returns the seconds that are left for saving; a further signal may make them fewer
        """
        peers = self.node.peers
        where = f" on {peers.name_of(peers.node)}" if peers.names else ""
        reason = f"ended by {ended_by.name}{where}"
        self.node.ended_by = ended_by
        self._checkpoints_before_end = self.run.checkpoint_writer.count
        self.had_finished = self.node.has_board and self.node.has_finished  # not because of the signal
        self.node.log("ending", reason=reason, grace_s=grace_s)

        def stop() -> None:
            self.node.report(StopAsked(at_s=time.monotonic(), reason=reason, signal=self.node.ended_by))
            self.run.injections.answered()
            if self.node.is_paused:  # nobody decides: the ranks are being ended or started, or we have broken
                self.node.is_settled.set()

        self.node.call(stop)
        # Every phase of saving has its deadline, and a second Ctrl-C ends the ranks.
        while not self.node.is_settled.wait(max(0.0, min(_LOOK_AGAIN_S, left_s()))) and self._thread.is_alive():
            if left_s() <= 0:
                limit = f"the grace time of {self.node.config.grace_s:g} s (--grace-s)"
                self._why_not_saved = f"no checkpoint was written: {limit} is over"
                self.node.log("grace_time_over")
                return

    def leave(self, ended_by: signal.Signals) -> bool:
        """This node leaves, and the others train on; returns when they do, or when the job ends instead.

        returns   whether the others train on

        What is saved, and how long that may take, is the leader's affair; a second Ctrl-C ends the ranks.
        """
        node = self.node
        reason = f"ended by {ended_by.name} on {node.peers.name_of(node.peers.node)}"
        node.log("leaving", reason=reason)

        def leave() -> None:
            if self.node.is_paused or node.verdict is not None:
                node.is_settled.set()
            else:
                node.report(node_messages.Leaving(reason))

        node.call(leave)
        while not node.is_settled.wait(_LOOK_AGAIN_S) and self._thread.is_alive():
            pass
        return node.verdict is not None and node.verdict.kind == "leave"

    def pause(self) -> None:
        """The group is about to be ended on purpose: exits are no faults from now on."""
        done = threading.Event()

        def pause() -> None:
            self.node.is_paused = True
            self.node.is_settled.set()
            for slot in self.node.here:
                self.group.watch.forget(slot)
                self.group.orders.end_parked()
            self.node.peers.close(self.node.selector)
            done.set()

        self.node.call(pause)
        done.wait(10)

    def note_end_asked(self) -> None:
        """The launcher has got a signal that ends the job; a signal handler calls it.

        Ranks that have got it too, from a scheduler that signals all processes, do not die of it before `end` is over.
        """
        if self.node.has_board:
            self.node.board.set(LEADER, Field.END_ASKED, 1)

    def announce_signal(self, number: int) -> None:
        """All ranks are about to get this signal from the agent, on behalf of who has sent it to the launcher."""
        if self.node.has_board:
            self.node.board.set(LEADER, Field.ENDED_BY, number)

    def end_ranks_at_once(self) -> None:
        """SIGKILL to all ranks and all that they have started; a signal handler may call it at any moment."""
        for slot in self.node.here:
            slot.kill()

    def stop(self, exit_code: int, reason: str = "", left_s: float = math.inf, is_stopped: bool = False) -> str:
        """End the thread, the standbys, and whatever a rank has left behind.

        exit_code   of the launcher
        reason      why the job has ended, as far as that was known before the last checkpoint was written
        left_s      seconds until the scheduler kills this process
        is_stopped  a signal to a launcher has ended it
        returns     the reason for the operator
        """
        self._is_stopping = True
        self.node.wake()
        if self._thread.is_alive():
            self._thread.join(10)
        self._reserve.give_up()
        self.run.standbys.end()
        self.end_ranks_at_once()
        self.node.remove_left_files(limit_s=_LEFT_LIMIT_S)
        self._control.close()
        self.run.checkpoint_writer.end(is_done=exit_code == 0, left_s=left_s)
        reason = self._with_what_was_saved(reason)
        if self._group is not None:
            self.node.domains.run("snapshots", self._group.snapshots.conclude)
        self.node.domains.run("incident notes", lambda: self.run.incidents.conclude(is_done=exit_code == 0))
        self.run.status.end(exit_code, reason, is_stopped)
        self.node.log("run_ended", exit_code=exit_code, reason=reason)
        return reason

    def _with_what_was_saved(self, reason: str) -> str:
        """The reason, with a checkpoint of the end that it does not name yet, or why there is none.

        Ranks may be lost, or time may be over, between the end of the checkpoint and the end of the job.
        """
        newest, verdict = self.run.checkpoint_writer.status, self.node.verdict
        is_saved = newest is not None and newest.number > self._checkpoints_before_end and not newest.reason
        if newest is not None and is_saved and self.node.ended_by and newest.path not in reason:
            return f"{verdict.first if verdict is not None else reason}; its state was saved: {newest.path}"
        is_over = verdict is None and reason and self._why_not_saved
        return f"{reason}; {self._why_not_saved}" if is_over else reason

    # The loop.

    def _loop(self) -> None:
        node, selector = self.node, self.node.selector
        while not self._is_stopping:
            try:
                happened = selector.select(self._wait_s())
                node.domains.look("file reserve", self._reserve.look)
                for key, _ in happened:
                    if selector.get_map().get(key.fd) is key:  # not what has got the number of one just closed
                        key.data()
                if self._group is not None:
                    node.board.set(LEADER, Field.AGENT_NS, time.monotonic_ns())
                    self._group.deadlines.pass_time()
                node.domains.run("commands", self._control.pass_time)
                if self._group is not None:  # also if nobody decides any more: ranks of other nodes wait for each other
                    self._group.end_turn()
                self._send_what_was_kept()
                node.domains.look("fault injection", self.run.injections.pass_time)
                if node.verdict is None and not node.is_paused and self._group is not None:
                    self._group.look()
                node.domains.look("status", self.run.status.publish)
            except Exception as error:
                self._renew(error)
                node.wake()  # for the calls behind one that has failed
            if self.node.is_broken and self.node.verdict is None:
                self._conclude_from_processes()

    def _renew(self, error: Exception) -> None:
        """Something that protection needs has failed: begin anew from the job as its events have made it.

        What was ordered last may not have been carried out, and what has just been seen may not have been decided: the
        machine is told, and orders again what it was at. If that fails too, or again within RENEWED_EVERY_S, the job
        goes on as under torchrun.
        """
        node, now = self.node, time.monotonic()
        reason = str(error) if isinstance(error, CannotDecideError) else f"{type(error).__name__}: {error}"
        node.log("supervisor_failed", error=reason, traceback="".join(traceback.format_exception(error)))
        is_again, self._renewed_at_s = now - self._renewed_at_s < RENEWED_EVERY_S, now
        if not node.is_paused and not is_again:
            try:
                logger.exception("ttprun's supervisor failed; a new one continues from the events recorded so far")
                if self._group is not None:
                    self._group.begin_anew(reason)
                return
            except Exception as another:
                error = another
                node.log("supervisor_failed", error=repr(another))
        logger.error(
            "ttprun's supervisor failed; from here on the job runs as under torchrun",
            exc_info=(type(error), error, error.__traceback__),
        )
        node.break_down()

    def _wait_s(self) -> float:
        """Seconds until something is due."""
        is_watching = self._group is not None and (not self._group.hang_detector.is_off or self.node.peers.names)
        wait_s = LOOK_EVERY_S if is_watching else _STATUS_EVERY_S
        timer_s = self.node.domains.run("fault injection", self.run.injections.next_timer_s)
        return wait_s if timer_s is None else max(0.0, min(wait_s, timer_s - time.monotonic()))

    def _send_what_was_kept(self) -> None:
        """To ranks that had no room for it: one that is stopped reads nothing, and nobody waits for it."""
        for slot in self.node.here:
            if slot.handler is not None:
                slot.handler.channel.flush()
        self.node.peers.flush()

    def _conclude_from_processes(self) -> None:
        slots = [slot for slot in self.node.here if slot.rank not in self.node.job.away]
        if not slots or any(slot.handler is None for slot in slots):
            return  # torch's agent has not started all of them yet
        codes = [slot.handler.proc.poll() for slot in slots]
        if any(codes):
            self.node.conclude(Verdict("restart", "a rank has failed and ttprun cannot repair it"))
        elif all(code == 0 for code in codes):
            self.node.conclude(Verdict("done"))
