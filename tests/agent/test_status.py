"""What the agent publishes of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ttprun import recovery
from ttprun.agent.status import StatusPublisher
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status
from ttprun.recovery.ladder import open_incident


def test_an_incident_that_goes_on_is_open_in_the_status_as_in_the_event_log(tmp_path: Path) -> None:
    run = RunDirectory.create("r1", tmp_path / "run")
    job = open_incident(recovery.new_job(recovery.Settings(world_size=1)), 10.0, "signal 9", "rank 0 was ended", 0.0)
    supervisor: Any = SimpleNamespace(
        job=job,
        seats=[],
        verdict=None,
        config=Config(),
        standbys=SimpleNamespace(ready=0, state="ready"),
        checkpoints=SimpleNamespace(status=None),
        snapshots=SimpleNamespace(newest=None),
    )
    publisher = StatusPublisher(run, Config(), world_size=1)
    assert job.incident is not None

    publisher.note_incident(job.incident)
    publisher.publish(supervisor)

    (published,) = read_status(run.status).incidents
    assert (job.incident.outcome, published.outcome) == ("open", "open")
    run.release()
