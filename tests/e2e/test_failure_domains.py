"""A bug of ttprun's own in the thread that decides: what protection does not need fails alone, the rest begins anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import PLAIN, REPOSITORY, Launch, Undisturbed, assert_only_replaced, assert_same_outcome
from ttprun.agent.base.loop import MEANWHILE

FAULT = "kill:rank=1,step=10,phase=backward"
# What raises in every phase of the recovery in which it is called, and the part whose failure that is.
PARTS = {
    "ttprun.agent.node.standbys:Standbys.take": "standbys",
    "ttprun.agent.node.standbys:StandbyWatch.look": "standbys",
    "ttprun.agent.lead.snapshots:Snapshots.look": "snapshots",
    "ttprun.agent.lead.writer:CheckpointWriter.look": "checkpoints in the background",
    "ttprun.agent.lead.schedules:QuiesceSchedule.look": "times for checkpoints",
    "ttprun.agent.lead.hang_detector:HangDetector._look": "hang detection",
    "ttprun.agent.node.process_watch:UnhookedRanks.look": "search for ranks without hooks",
    "ttprun.agent.lead.incidents:Incidents.note_compared": "incident notes",
    "ttprun.agent.launcher.status_publisher:StatusPublisher.publish": "status",
    "ttprun.agent.launcher.control_socket:ControlSocket.pass_time": "commands",
    "ttprun.chaos.injections:Injections.pass_time": "fault injection",
    "ttprun.agent.base.loop:FileReserve.look": "file reserve",
}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Its launches end with the test."""
    paths = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    launches: list[Launch] = []
    yield launches
    for one in launches:
        one.stop()
        harness.end_processes_of(one.folder / "run")


def run_broken(launches: list[Launch], folder: Path, monkeypatch: pytest.MonkeyPatch, breaks: list[str]) -> harness.Run:
    monkeypatch.setenv("BREAKS", ",".join(breaks))
    options = ["--run-dir", str(folder / "run"), "--allow-faults", "--fault", FAULT]
    launches.append(Launch("tests.e2e.broken_launcher", PLAIN, 2, folder, options, (), folder / "run", (FAULT,)))
    return launches[-1].finish()


def test_parts_that_raise_in_every_phase_of_a_recovery_cost_those_parts_and_a_line_each(
    launch: list[Launch], undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_broken(launch, tmp_path, monkeypatch, [*PARTS])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    failed = {event["part"] for event in result.events if event["event"] == "part_failed"}
    assert failed == set(PARTS.values())
    for part in failed:
        assert result.output.count(f"ttprun: {part} failed (ArithmeticError") == 1
        assert MEANWHILE[part] in result.output
    assert not any(event["event"] == "supervisor_failed" for event in result.events)


@pytest.mark.parametrize("orders", [["SpawnRank", "Replay"], ["SendState", "Resume"]])
def test_a_supervisor_that_fails_as_it_orders_a_repair_begins_anew_and_the_rank_is_replaced(
    launch: list[Launch], undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: list[str]
) -> None:
    result = run_broken(launch, tmp_path, monkeypatch, orders)

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert max(event["attempt"] for event in result.events if event["event"] == "incident") == 1 + len(orders)
    assert result.output.count("a new one continues from the events recorded so far") == len(orders)
    assert "as under torchrun" not in result.output
