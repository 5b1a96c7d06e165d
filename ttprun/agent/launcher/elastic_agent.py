"""torch's elastic agent, with a supervisor that answers for the ranks.

torch's agent does what it does well: rendezvous, the environment of the ranks, log redirection, whole-group restarts.
It starts the processes through our handlers, and asks the supervisor how they are instead of polling them: a rank that
is being replaced is part of a healthy group.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ttprun.agent.base.ground import Failure, Verdict
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.spare_pool import Listener, RendezvousKeys
from ttprun.agent.between.latecomers import LOST, MovedStore, Taken, wait_for_slots
from ttprun.agent.between.rendezvous import NotMetError, Place, first_start, meet, regrouping
from ttprun.agent.launcher.group import NewGroup
from ttprun.agent.launcher.outcome import DO_NOT_RESTART, Outcome
from ttprun.agent.launcher.signals import Signals
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.node.rank_processes import RankHandler
from ttprun.early_signals import ENDED_BY_SIGNAL
from ttprun.protocol.meeting import Concluded, Regroup
from ttprun.torch_versions import GRACE_S

logger = logging.getLogger("ttprun")
_NO_JOB_LIMIT_S = 20.0  # for who comes too many to learn of the job, before it takes part in the rendezvous
_LOOK_AGAIN_S = 0.3
_LOOK_FOR_JOB_S = 2.0
_STANDBY_LIMIT_S = 20.0
_LEAST_GRACE_S = 0.5  # of ranks at the end of a scheduler's grace time
torch_distributed: Any = importlib.import_module("torch.distributed")
torch_multiprocessing: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")


@dataclass(frozen=True)
class Meeting:
    """How the agent of this node meets those of the others; by default there are none.

    place        of this node, which has no numbers yet
    moved_store  which this agent serves when it leads; None: the rendezvous needs none
    find_job     returns where the launchers of the job meet if it runs already, host:port; "": nowhere
    nodes        that train
    is_elastic   nodes may join and leave
    begin_to_lead   called when a group starts that this node's agent leads
    ended_meanwhile   how the job has ended since this launcher was started; None if it has not, as far as is known
    """

    place: Place = Place()  # noqa: RUF009 - it is frozen
    moved_store: MovedStore | None = None
    find_job: Callable[[], str] | None = None
    nodes: int = 1
    is_elastic: bool = False
    begin_to_lead: Callable[[], None] = lambda: None
    ended_meanwhile: Callable[[], Outcome | None] = lambda: None


class JobFoundError(Exception):
    """The job runs already, and its launchers meet elsewhere: this one waits for the rendezvous in vain.

    store   where they meet, host:port
    """

    def __init__(self, store: str) -> None:
        super().__init__(f"the job runs already, and its launchers meet at {store}")
        self.store = store


class ReplacingAgent(LocalElasticAgent):
    """An elastic agent whose local ranks are replaced one by one.

    has_started_ranks   in this process, at least one group of ranks was started
    """

    has_started_ranks = False

    def __init__(self, supervisor: Supervisor, signals: Signals, meeting: Meeting, *args: Any, **kwargs: Any) -> None:
        """The last two are what torch makes its agent with."""
        super().__init__(*args, **kwargs)
        self.supervisor = supervisor
        self.signals = signals
        self.meeting = meeting
        self._groups_started = 0
        self._has_entered = False
        self._taken: Taken | None = None
        self._order: Regroup | None = None  # which the present group has followed
        self._again: Peers | None = None  # who have met for it
        self._listener: Listener | None = None  # at which the others come in if this agent leads the next group
        self._ranks_store: Any = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        supervisor = self.supervisor
        ranks = [(worker.global_rank, worker.local_rank) for worker in worker_group.workers]
        taken, again = self._taken, self._again
        try:
            peers = again or (self._meet(worker_group) if taken is None else taken.peers)
        except NotMetError as error:
            logger.warning("nothing is repaired, as under torchrun: %s", error)
            self._judge = super()._monitor_workers  # type: ignore[method-assign]
            return dict(super()._start_workers(worker_group))

        def on_lead() -> None:
            if peers is not None:
                # It leads instead of a lost one: name its spare pool, if the store lives; that may take long.
                about = (worker_group, peers)
                threading.Thread(target=self._announce, args=about, name="ttprun-announce", daemon=True).start()

        restarts_left = self._remaining_restarts
        group = NewGroup(
            ranks, self._replace_handler, on_lead, worker_group.spec.max_restarts - restarts_left, restarts_left
        )
        if again is not None and self._order is not None:
            supervisor.begin_resized_group(group, again, self._order)
            self._announce(worker_group, again)
        else:
            supervisor.begin_group(group, peers)
        if peers is None or not peers.is_follower:
            self.meeting.begin_to_lead()
        if taken is not None:
            supervisor.group.orders.take_over(taken.records)
        if peers is not None:
            # Who comes later waits for slots, and that is no reason to start all ranks again.
            worker_group.spec.rdzv_handler.num_nodes_waiting = lambda: 0  # type: ignore[method-assign]
            self._leave_lost_store_alone(worker_group.spec.rdzv_handler)
        with _handlers_made_by(self._make_handler):
            pids = super()._start_workers(worker_group)
        self.signals.install()
        supervisor.group_started(is_restart=self._groups_started > 0)
        self._groups_started += 1
        ReplacingAgent.has_started_ranks = True
        return dict(pids)

    def _meet(self, worker_group: WorkerGroup) -> Peers | None:
        """Connect to the agents of the other nodes; None if there are none."""
        group: Any = worker_group
        if group.group_world_size <= 1 and not self.meeting.is_elastic:
            return None
        master = f"{group.master_addr} {group.master_port}"
        numbers = {"number": group.group_rank, "size": group.group_world_size, "ranks": len(group.workers)}
        peers = meet(first_start(group.store), self._place(**numbers, master=master))
        self._announce(worker_group, peers)
        return peers

    def _place(self, **numbers: Any) -> Place:
        """This node, with a listener for the next group if that may be on other nodes."""
        if not self.meeting.is_elastic:
            return replace(self.meeting.place, **numbers)
        self._listener = self.meeting.place.open_listener()
        return replace(self.meeting.place, **numbers, listener=self._listener.where)

    def _announce(self, worker_group: WorkerGroup, peers: Peers) -> None:
        """Name the spare pool of a group that this agent leads."""
        if peers.pool is None or peers.is_follower:
            return
        where = peers.pool.listener.where
        moved, keys = self.meeting.moved_store, self._rendezvous_keys(worker_group)
        try:
            if moved is not None:
                moved.announce(self.meeting.place.address, where)
            if keys is not None:
                keys.announce(where)
        except Exception as error:  # torch's stores raise errors of their own
            if moved is None:
                logger.warning("no other node can join: the rendezvous store is lost (%s)", error)

    # Another group, on other nodes.

    def _meet_again(self, worker_group: WorkerGroup, order: Regroup) -> None:
        """Take the place in a group that the order names. Raises SignalException if too few nodes come."""
        listener = self._listener
        assert listener is not None
        self._order, self._again, self._taken = order, None, None
        group: Any = worker_group
        place = self._place(number=order.node, size=order.size, ranks=group.spec.local_world_size)
        try:
            self._again = meet(regrouping(order, listener, self._make_store), place)
        except NotMetError as error:
            reason = f"{order.reason}; the nodes have not met again: {error}"
            self.supervisor.node.conclude(Verdict("fail", reason))
            raise SignalException(reason, signal.SIGTERM) from None
        self._remaining_restarts -= 0 if order.place else 1
        group.spec.max_restarts = order.attempt + self._remaining_restarts
        self._join_group(worker_group, self._again)

    def _make_store(self) -> str:
        """A store for the ranks of the next group; returns its address and port."""
        self._ranks_store = torch_distributed.TCPStore(
            self.meeting.place.address, 0, is_master=True, wait_for_workers=False
        )
        return f"{self.meeting.place.address} {self._ranks_store.port}"

    # Slots of a lost node.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Take part in the rendezvous; a launcher that comes when the job has all its nodes waits for slots instead."""
        verdict = self.supervisor.node.verdict
        order = None if verdict is None else verdict.regroup
        self._taken = self._again = None
        if order is None and not self._has_entered and self.meeting.place.alike:
            answer = self._wait_for_slots(worker_group)
            if isinstance(answer, Taken):
                self._taken = answer
            else:
                order = answer
        self._has_entered = True
        if order is not None:
            self._meet_again(worker_group, order)
        elif self._taken is not None:
            self._join_group(worker_group, self._taken.peers)
        else:
            with self._looking_for_job(worker_group.spec.rdzv_handler):
                super()._rendezvous(worker_group)

    @contextlib.contextmanager
    def _looking_for_job(self, handler: Any) -> Iterator[None]:
        """While this launcher waits for the others, they may turn out to train: it came before another one led.

        In it, the rendezvous raises JobFoundError then, or SystemExit if the job is done.
        """
        holder, find_job = getattr(handler, "_state_holder", None), self.meeting.find_job
        if holder is None or find_job is None or self._groups_started:
            yield
            return
        stores: list[str] = []
        is_over, sync = threading.Event(), holder.sync

        def look() -> None:
            while not is_over.wait(_LOOK_FOR_JOB_S) and not stores:
                stores.extend(filter(None, [find_job()]))

        def sync_unless_found() -> Any:
            ended = self.meeting.ended_meanwhile()
            if stores or (ended is not None and ended.is_done):
                handler.shutdown = lambda: True  # others may meet there
                raise JobFoundError(stores[0]) if stores else SystemExit(0)
            return sync()

        holder.sync = sync_unless_found
        threading.Thread(target=look, name="ttprun-find-job", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
            holder.sync = sync

    def _join_group(self, worker_group: WorkerGroup, peers: Peers) -> None:
        """Let the group be as the others have it."""
        group: Any = worker_group
        size, first = peers.size * peers.ranks_per_node, peers.node * peers.ranks_per_node
        everywhere = {"world_size": size, "role_world_size": size}
        numbers = range(peers.ranks_per_node)
        group.workers = [
            Worker(number, global_rank=first + number, role_rank=first + number, **everywhere) for number in numbers
        ]
        group.group_rank, group.group_world_size = peers.node, peers.size
        group.master_addr, port = peers.master.split()
        group.master_port = int(port)
        self._store = group.store = group.spec.rdzv_handler._store

    def _rendezvous_keys(self, worker_group: WorkerGroup) -> RendezvousKeys | None:
        """None: this kind of rendezvous has no store that all its groups share."""
        handler: Any = worker_group.spec.rdzv_handler
        store = getattr(handler, "_store", None)
        return None if store is None else RendezvousKeys(store, handler.get_run_id())

    def _wait_for_slots(self, worker_group: WorkerGroup) -> Taken | Regroup | None:
        """Slots of a lost node, or of a group that grows; None: the job has room for one more, or nobody runs it."""
        rendezvous_keys = self._rendezvous_keys(worker_group)
        if rendezvous_keys is None:
            return None
        if rendezvous_keys.arrive() <= self.meeting.nodes:
            return None
        node, run = self.supervisor.node, self.supervisor.run
        node.call(run.standby_watch.prepare)

        def warm_up(modules: list[str], files: list[str]) -> None:
            node.call(lambda: run.standbys.warm_up(modules, files))

        if self.meeting.is_elastic:  # all wait for its ranks when it joins
            self.supervisor.wait_for_standby(_STANDBY_LIMIT_S)
        is_over: set[str] = set()
        ends_s = time.monotonic() + _NO_JOB_LIMIT_S
        what_for = "to join at a boundary" if self.meeting.is_elastic else "to take the place of one that is lost"
        logger.warning("the job has all its nodes: this one waits %s", what_for)
        while time.monotonic() < ends_s:
            self._end_with_job(worker_group)
            where = rendezvous_keys.announced()
            if where is None or where.token in is_over:
                time.sleep(_LOOK_AGAIN_S)
                continue
            taken = wait_for_slots(where, self._place(), warm_up)
            if isinstance(taken, Taken | Regroup):
                return taken
            if taken is None:  # nobody is there, or not yet
                time.sleep(_LOOK_AGAIN_S)
                continue
            if taken.kind not in ("restart", "resize", "leave", LOST):
                self._end_like_job(worker_group, taken)
            if taken.kind != LOST:  # else the network was down: its agent may lead yet
                is_over.add(where.token)
            ends_s = time.monotonic() + _NO_JOB_LIMIT_S
        return None

    def _end_with_job(self, worker_group: WorkerGroup) -> None:
        """End if the job has come to its end while nobody could let this launcher know."""
        ended = self.meeting.ended_meanwhile()
        if ended is not None:
            kind, code = "done" if ended.is_done else "fail", ended.exit_code or 0
            exit_code = ENDED_BY_SIGNAL - code if code > ENDED_BY_SIGNAL else code
            self._end_like_job(worker_group, Concluded(kind, ended.reason, code != DO_NOT_RESTART, exit_code))

    def _end_like_job(self, worker_group: WorkerGroup, concluded: Concluded) -> NoReturn:
        if concluded.kind == "done":
            raise SystemExit(0)
        # A scheduler that starts the others again must not take this one for done.
        self.supervisor.node.ended_by = concluded.ended_by
        self.supervisor.node.hear_conclusion(Verdict(concluded.kind, concluded.reason, concluded.has_progress))
        raise ChildFailedError(worker_group.spec.role, {0: ProcessFailure(0, 0, concluded.exit_code, "")})

    def _leave_lost_store_alone(self, handler: Any) -> None:
        """At the end torch writes to the rendezvous store; on a node that cannot be reached that takes minutes.

        Nor need it know every few seconds that this node is there: the agents do, and each failure is 30 lines.
        """
        shut_down = type(handler).shutdown

        def shutdown() -> bool:
            return True if self.supervisor.node.peers.has_lost else bool(shut_down(handler))

        handler.shutdown = shutdown

    def _exit_barrier(self) -> None:
        """Wait for the other agents; over nodes all have ended together, and the store may be lost."""
        if not self.supervisor.node.peers.names:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _make_handler(self, **start: Any) -> RankHandler:
        node = self.supervisor.node
        if self._taken is not None or self._again is not None:
            handler = self.supervisor.start_from_standby(start)
        else:
            handler = RankHandler(start, str(node.run.path), is_new=True, is_python=node.is_python)
        self.supervisor.assign(start["local_rank_id"], handler)
        return handler

    def _replace_handler(self, local_rank: int, handler: RankHandler) -> None:
        context: Any = self._pcontext
        context.subprocess_handlers[local_rank] = handler
        self._worker_group.workers[local_rank].id = handler.proc.pid

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            return self._judge(worker_group)
        except SignalException:
            raise
        except Exception:
            logger.exception("ttprun cannot monitor the ranks; torch does, and nothing is repaired from now on")
            self._judge = super()._monitor_workers  # type: ignore[method-assign]
            return self._judge(worker_group)

    def _judge(self, worker_group: WorkerGroup) -> RunResult:
        if self.supervisor.node.peers.has_lost:
            with contextlib.suppress(AttributeError):  # another kind of rendezvous, or another release
                worker_group.spec.rdzv_handler._keep_alive_timer._ctx.stop_event.set()  # type: ignore[attr-defined]
        if self.supervisor.node.verdict is None:
            return RunResult(state=WorkerState.HEALTHY)
        self.supervisor.pause()
        verdict = self.supervisor.node.verdict  # only now it is final
        if verdict.kind == "resize":
            self.supervisor.end_ranks_at_once()  # their state is saved
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        if verdict.kind == "leave":
            raise SignalException(verdict.reason, signal.SIGUSR1)
        if verdict.kind == "done" and self.supervisor.node.has_killed_ones:  # torch would take these for failed ones
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        if verdict.kind == "done":
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        if verdict.kind == "fail" or not verdict.has_progress:
            self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED, failures=self._failures(worker_group))

    def _failures(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """The root cause, as torch reports it; ranks that are ended because of it are not failures."""
        verdict = self.supervisor.node.verdict
        why = verdict.reason if verdict is not None else ""
        first = worker_group.workers[0].global_rank
        failure = self.supervisor.node.first_failure.found or Failure(first, 0, 1, why)
        local_ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        if failure.rank not in local_ranks:  # it is on another node: torch knows only those of this one
            failure = Failure(first, 0, failure.exit_code, why)
        local_rank = local_ranks[failure.rank]
        context: Any = self._pcontext
        return {failure.rank: failure.as_torch_reports_it(local_rank, context.error_files[local_rank])}

    # What torch passes to these two beside the group and the signal differs between its releases.

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.supervisor.pause()
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        elsewhere = self.supervisor.node.ended_by
        may_leave = self.meeting.is_elastic or "notice" in self.supervisor.node.config.move_on
        is_announced = may_leave and self.signals.first is signal.SIGUSR1 and self.has_started_ranks
        if is_announced and self.supervisor.leave(signal.SIGUSR1):
            self.supervisor.end_ranks_at_once()
        elif self.signals.first is not None:
            self.supervisor.end(self.signals.first, kwargs.get("timeout", GRACE_S), self.signals.left_to_save_s)
            self.supervisor.announce_signal(death_sig)
        elif elsewhere:
            death_sig = signal.Signals(elsewhere)
            self.supervisor.announce_signal(death_sig)
        self.supervisor.pause()
        left_s = self.signals.left_s()
        if left_s < kwargs.get("timeout", GRACE_S) and "timeout" in signature(super()._shutdown).parameters:
            kwargs["timeout"] = max(_LEAST_GRACE_S, left_s / 2)
        super()._shutdown(death_sig, *args, **kwargs)


@contextlib.contextmanager
def _handlers_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """While in it, torch makes its subprocess handlers with our function."""
    original = torch_multiprocessing.get_subprocess_handler
    torch_multiprocessing.get_subprocess_handler = make
    try:
        yield
    finally:
        torch_multiprocessing.get_subprocess_handler = original
