"""torch's elastic agent, with a supervisor that answers for the ranks.

torch's agent does what it does well: rendezvous, the environment of the ranks, log redirection, whole-group restarts.
It starts the processes through our handlers, and asks the supervisor how they are instead of polling them: a rank that
is being replaced is part of a healthy group.
"""

from __future__ import annotations

import importlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttprun.agent.failures import Failure
from ttprun.agent.meeting import NotMetError, Place, Taken, meet, wait_for_seats
from ttprun.agent.peers import Peers
from ttprun.agent.processes import RankHandler
from ttprun.agent.room import Hallway
from ttprun.agent.signals import Signals
from ttprun.agent.supervisor import Supervisor
from ttprun.torch_versions import GRACE_S

logger = logging.getLogger("ttprun")
_NO_JOB_LIMIT_S = 20.0  # for who comes too many to learn of the job, before it takes part in the rendezvous
_LOOK_AGAIN_S = 0.3
torch_multiprocessing: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")


class ReplacingAgent(LocalElasticAgent):
    """An elastic agent whose local ranks are replaced one by one.

    supervisor, signals   set on the class before torch makes its agent
    address, alike, save_dir   as in `meeting.Place`; the same holds for them in a job on several nodes
    nodes                 that train
    has_started_ranks     at least one group of ranks was started
    """

    supervisor: Supervisor
    signals: Signals
    address = save_dir = ""
    alike: Mapping[str, str] = MappingProxyType({})
    nodes = 1
    has_started_ranks = False
    _groups_started = 0
    _has_entered = False
    _taken: Taken | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        supervisor = self.supervisor
        ranks = [(worker.global_rank, worker.local_rank) for worker in worker_group.workers]
        taken = self._taken
        try:
            peers = self._meet(worker_group) if taken is None else taken.peers
        except NotMetError as error:
            logger.warning("nothing is repaired, as under torchrun: %s", error)
            self._judge = super()._monitor_workers  # type: ignore[method-assign]
            return dict(super()._start_workers(worker_group))
        supervisor.begin_group(ranks, self._replace_handler, peers)
        if taken is not None:
            supervisor.take_over(taken.records)
        if peers is not None:  # who comes later waits for seats, and that is no reason to start all ranks again
            worker_group.spec.rdzv_handler.num_nodes_waiting = lambda: 0  # type: ignore[method-assign]
        supervisor.parts.status.restarts_left = self._remaining_restarts
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
        if group.group_world_size <= 1:
            return None
        master = f"{group.master_addr} {group.master_port}"
        sizes = group.group_rank, group.group_world_size, len(group.workers)
        place = Place(*sizes, self.address, self.alike, master, self.save_dir)
        peers = meet(group.store, place)
        hallway = self._hallway(worker_group)
        if peers.room is not None and hallway is not None:
            hallway.announce(peers.room.door.where)
        return peers

    # Seats of a lost node.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Take part in the rendezvous; a launcher that comes when the job has all its nodes waits for seats instead."""
        self._taken = None if self._has_entered or not self.alike else self._wait_for_seats(worker_group)
        self._has_entered = True
        if self._taken is None:
            super()._rendezvous(worker_group)
            return
        group: Any = worker_group
        peers = self._taken.peers
        size, first = peers.size * peers.ranks_per_node, peers.node * peers.ranks_per_node
        everywhere = {"world_size": size, "role_world_size": size}
        numbers = range(peers.ranks_per_node)
        group.workers = [Worker(one, global_rank=first + one, role_rank=first + one, **everywhere) for one in numbers]
        group.group_rank, group.group_world_size = peers.node, peers.size
        group.master_addr, port = self._taken.master.split()
        group.master_port = int(port)
        self._store = group.store = group.spec.rdzv_handler._store

    def _hallway(self, worker_group: WorkerGroup) -> Hallway | None:
        """None: this kind of rendezvous has no store that all its groups share."""
        handler: Any = worker_group.spec.rdzv_handler
        store = getattr(handler, "_store", None)
        return None if store is None else Hallway(store, handler.get_run_id())

    def _wait_for_seats(self, worker_group: WorkerGroup) -> Taken | None:
        """Seats of a lost node; None: the job has room for one more node, or nobody runs it."""
        hallway = self._hallway(worker_group)
        if hallway is None or hallway.arrive() <= self.nodes:
            return None
        self.supervisor.prepare_standbys()
        tried: set[str] = set()
        ends_s = time.monotonic() + _NO_JOB_LIMIT_S
        while time.monotonic() < ends_s:
            where = hallway.announced()
            if where is None or where["token"] in tried:
                time.sleep(_LOOK_AGAIN_S)
                continue
            tried.add(where["token"])
            logger.warning("the job has all its nodes: this one waits to take the place of one that is lost")
            taken = wait_for_seats(where, self.address, self.alike, self.supervisor.warm_up_standbys)
            if isinstance(taken, Taken):
                return taken
            if taken is not None and taken.kind != "restart":
                raise SystemExit(0)
            ends_s = time.monotonic() + _NO_JOB_LIMIT_S
        return None

    def _exit_barrier(self) -> None:
        """Wait for the other agents; over nodes all have ended together, and the store may be lost."""
        if not self.supervisor.node.peers.names:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _make_handler(self, **start: Any) -> RankHandler:
        node = self.supervisor.node
        if self._taken is not None:
            handler = self.supervisor.start_from_standby(start)
        else:
            handler = RankHandler(start, str(node.run.path), is_new=True, is_python=node.is_python)
        self.supervisor.sit(start["local_rank_id"], handler)
        return handler

    def _replace_handler(self, local_rank: int, handler: RankHandler) -> None:
        context: Any = self._pcontext
        context.subprocess_handlers[local_rank] = handler
        self._worker_group.workers[local_rank].id = handler.proc.pid

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            return self._judge(worker_group)
        except Exception:
            logger.exception("ttprun cannot monitor the ranks; torch does, and nothing is repaired from now on")
            self._judge = super()._monitor_workers  # type: ignore[method-assign]
            return self._judge(worker_group)

    def _judge(self, worker_group: WorkerGroup) -> RunResult:
        if self.supervisor.node.verdict is None:
            return RunResult(state=WorkerState.HEALTHY)
        self.supervisor.pause()
        verdict = self.supervisor.node.verdict  # only now it is final
        if verdict.kind == "done" and self.supervisor.node.job.away:  # torch would take these for failed ones
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
        return {failure.rank: failure.as_torch_tells_it(local_rank, context.error_files[local_rank])}

    # What torch passes to these two beside the group and the signal differs between its releases.

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.supervisor.pause()
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        elsewhere = self.supervisor.node.ended_by
        if self.signals.first is not None:
            self.supervisor.end(self.signals.first, kwargs.get("timeout", GRACE_S))
            self.supervisor.announce_signal(death_sig)
        elif elsewhere:
            death_sig = signal.Signals(elsewhere)
            self.supervisor.announce_signal(death_sig)
        self.supervisor.pause()
        super()._shutdown(death_sig, *args, **kwargs)


class _handlers_made_by:
    """While in it, torch makes its subprocess handlers with our function."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._original = torch_multiprocessing.get_subprocess_handler
        torch_multiprocessing.get_subprocess_handler = self._make

    def __exit__(self, *_: object) -> None:
        torch_multiprocessing.get_subprocess_handler = self._original
