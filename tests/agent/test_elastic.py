"""What is reported to torch's agent of its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState

from ttprun.agent.base.ground import FirstFailure, Verdict
from ttprun.agent.launcher.elastic_agent import ReplacingAgent


class FakeSupervisor:
    """The job is ended by somebody just before the group that is to be restarted is left alone."""

    def __init__(self) -> None:
        verdict, peers = Verdict("restart", "a rank is lost"), SimpleNamespace(has_lost=False)
        self.node = SimpleNamespace(verdict=verdict, first_failure=FirstFailure(), peers=peers)

    def pause(self) -> None:
        self.node.verdict = Verdict("fail", "ended by the scheduler", has_progress=False)


def test_a_job_that_is_ended_as_its_group_is_to_be_restarted_is_not_restarted() -> None:
    agent: Any = object.__new__(ReplacingAgent)
    agent.supervisor, agent._remaining_restarts = FakeSupervisor(), 3
    agent._pcontext = SimpleNamespace(error_files={0: ""})
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=0, local_rank=0)])

    result = agent._monitor_workers(group)

    assert (result.state, agent._remaining_restarts) == (WorkerState.FAILED, 0)
