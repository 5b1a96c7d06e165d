"""torch's elastic agent, with a supervisor that answers for the ranks.

torch's agent does what it does well: rendezvous, the environment of the ranks, log redirection, whole-group restarts.
It starts the processes through our handlers, and asks the supervisor how they are instead of polling them: a rank that
is being replaced is part of a healthy group.
"""

from __future__ import annotations

import importlib
import logging
import signal
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttprun.agent.failures import Failure
from ttprun.agent.meeting import NotMetError, Place, meet
from ttprun.agent.peers import Peers
from ttprun.agent.processes import RankHandler
from ttprun.agent.signals import Signals
from ttprun.agent.supervisor import Supervisor
from ttprun.torch_versions import GRACE_S

logger = logging.getLogger("ttprun")
torch_multiprocessing: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")


class ReplacingAgent(LocalElasticAgent):
    """An elastic agent whose local ranks are replaced one by one.

    supervisor, signals   set on the class before torch makes its agent
    address, alike        as in `meeting.Place`; the same holds for them in a job on several nodes
    has_started_ranks     at least one group of ranks was started
    """

    supervisor: Supervisor
    signals: Signals
    address = ""
    alike: Mapping[str, str] = MappingProxyType({})
    has_started_ranks = False
    _groups_started = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        supervisor = self.supervisor
        ranks = [(worker.global_rank, worker.local_rank) for worker in worker_group.workers]
        try:
            peers = self._meet(worker_group)
        except NotMetError as error:
            logger.warning("nothing is repaired, as under torchrun: %s", error)
            self._judge = super()._monitor_workers  # type: ignore[method-assign]
            return dict(super()._start_workers(worker_group))
        supervisor.begin_group(ranks, self._replace_handler, peers)
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
        place = Place(group.group_rank, group.group_world_size, len(group.workers), self.address, self.alike)
        return meet(group.store, place)

    def _make_handler(self, **start: Any) -> RankHandler:
        node = self.supervisor.node
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
        if self.signals.first is not None:
            self.supervisor.end(f"ended by {self.signals.first.name}", kwargs.get("timeout", GRACE_S))
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
