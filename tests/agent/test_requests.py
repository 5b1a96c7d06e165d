"""What other commands hear of a running job when they ask it for a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ttprun import recovery
from ttprun.agent.between.peers import Peers
from ttprun.agent.node.control_socket import Requests
from ttprun.protocol.control_requests import Rejected, SaveNow


def requests_of(job: recovery.Job, **differing: Any) -> Requests:
    config = SimpleNamespace(mindio=False)
    node: Any = SimpleNamespace(
        **{
            "job": job,
            "verdict": None,
            "is_broken": False,
            "config": config,
            "peers": Peers(),
            "role": SimpleNamespace(asked_elsewhere=""),
        }
        | differing
    )
    nobody: Any = None
    return Requests(node, nobody, nobody)


def test_who_asks_too_early_hears_who_is_not_ready() -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))

    reported = requests_of(job).answer(SaveNow(), None)

    assert reported == Rejected("the hooks of ranks 0, 1 have not reported yet")


def test_who_asks_when_nobody_decides_any_more_hears_so() -> None:
    job = recovery.new_job(recovery.Settings(world_size=1))

    reported = requests_of(job, is_broken=True).answer(SaveNow(), None)

    assert reported == Rejected("ttprun's supervisor has failed: the job runs as under torchrun")
