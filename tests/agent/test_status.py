"""What the agent publishes of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ttprun import recovery
from ttprun.agent.status import StatusPublisher
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status
from ttprun.recovery.ladder import open_incident


def publishing(tmp_path: Path) -> tuple[RunDirectory, StatusPublisher, recovery.Incident, Any]:
    """A run of one rank that is lost: its folder, publisher, incident, and what stands for its supervisor."""
    run = RunDirectory.create("r1", tmp_path / "run")
    job = open_incident(recovery.new_job(recovery.Settings(world_size=1)), 10.0, "signal 9", "rank 0 was ended", 0.0)
    supervisor = SimpleNamespace(
        job=job,
        seats=[],
        verdict=None,
        config=Config(),
        standbys=SimpleNamespace(ready=0, state="ready"),
        checkpoints=SimpleNamespace(status=None),
        snapshots=SimpleNamespace(newest=None),
    )
    assert job.incident is not None
    return run, StatusPublisher(run, Config(), world_size=1), job.incident, supervisor


def test_an_incident_that_goes_on_is_open_in_the_status_as_in_the_event_log(tmp_path: Path) -> None:
    run, publisher, incident, supervisor = publishing(tmp_path)

    publisher.note_incident(incident)
    publisher.publish(supervisor)

    (published,) = read_status(run.status).incidents
    assert (incident.outcome, published.outcome) == ("open", "open")
    run.release()


def test_an_incident_has_one_list_of_what_is_not_proved(tmp_path: Path) -> None:
    run, publisher, incident, supervisor = publishing(tmp_path)
    publisher.not_proved.take(0, ("game (sim.Game): it can change, and tells nothing of its state",))

    publisher.note_incident(replace(incident, ranks=(0,)))
    publisher.note_compared(0, ["1 batch"], ["1 loss is another one but for rounding"])
    publisher.publish(supervisor)

    (published,) = read_status(run.status).incidents
    assert published.equal == ("rank 0: 1 batch",)
    assert published.not_proved == (
        "game (sim.Game): it can change, and tells nothing of its state",
        "rank 0: 1 loss is another one but for rounding",
    )
    run.release()
