"""Nodes join and leave while the job runs (`--elastic`): network namespaces of this machine, a launcher in each."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Launch, Run, Undisturbed, assert_no_orphans, start_ttprun
from tests.e2e.test_nodes import at_gate, leading, start_gated
from tests.nodes import Nodes, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
COUNTS, GATED = "counts_samples.py", "gated_steps.py"


class Job:
    """Launchers of one elastic job, whose ranks wait before some steps until a gate is open.

    samples   of an epoch; there are two
    """

    def __init__(self, nodes: Nodes, folder: Path, size: str, samples: int, gates: str) -> None:
        self.nodes, self.folder, self.samples = nodes, folder, samples
        self._size, self._gates = size, gates
        self.launches: dict[str, Launch] = {}

    def start(self, number: int, name: str = "", ranks: int = 1, options: tuple[str, ...] = ()) -> Launch:
        """A launcher on a node."""
        launch = start_ttprun(
            COUNTS,
            ranks,
            self.folder / (name or str(number)),
            options=[
                *self.nodes.rendezvous(number, self._size),
                *("--elastic", "--save-dir", str(self.folder / "save"), *options),
            ],
            script_args=["--samples", str(self.samples), "--gates", self._gates, "--gate", str(self.folder / "gate")],
            out=self.folder / "out",
            within=self.nodes.inside(number),
        )
        self.launches[name or str(number)] = launch
        return launch

    def begun(self, *joining: int) -> list[Launch]:
        """Node 0 begins alone, and these join it at step 3; returns the launchers."""
        launches = [self.start(0)]
        launches[0].wait_for_line(0, "step 3 ")
        launches += [self.start(number) for number in joining]
        self.wait_for_resizes("0", 1)
        return launches

    def open(self, step: int) -> None:
        """Let the ranks go on from this gate."""
        (self.folder / f"gate{step}").touch()

    def wait_for_resizes(self, name: str, count: int) -> None:
        """Block until so many resizes have begun that this launcher has asked for; see `has_begun_resizes`."""
        wait_until(lambda: has_begun_resizes(self.folder / name, count))

    def wait_for_size(self, name: str, world_size: int) -> None:
        """Block until this launcher's status has so many ranks, and all of them train."""
        path = self.folder / name / "run" / "status.json"

        def is_so() -> bool:
            status = json.loads(path.read_text())
            return bool(status["world_size"] == world_size and status["state"] == "healthy")

        wait_until(is_so)

    def finished(self) -> dict[str, Run]:
        """The runs of all launchers at their end."""
        runs = {name: launch.finish() for name, launch in self.launches.items()}
        for run in runs.values():
            assert_no_orphans(run)
        return runs


def wait_until(is_so: Callable[[], bool], limit_s: float = 180.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def has_begun_resizes(folder: Path, count: int) -> bool:
    """Whether a launcher has asked so often for other nodes, and the ranks have saved their state for the newest time.

    They are held at its boundary then. If their gate were opened before, they could still pass another boundary.
    """
    asked = (folder / "run" / "events.jsonl").read_text().split('"resize_asked"')[1:]
    return len(asked) >= count and '"checkpoint_written"' in asked[-1]


def resizes(run: Run) -> list[tuple[str, int, int]]:
    """(outcome, boundary, steps lost) of each change of the nodes."""
    return [(one["outcome"], one["boundary"], one["steps_lost"]) for one in run.incidents if one["rung"] == "resize"]


def test_a12_nodes_join_while_the_job_runs_and_each_sample_is_trained_on_once_an_epoch(tmp_path: Path) -> None:
    with Nodes(3) as nodes:
        job = Job(nodes, tmp_path, "1:3", 120, "3,6")
        first, _ = job.begun(1)
        job.open(3)
        first.wait_for_line(0, "step 6 ")
        job.start(2)
        job.wait_for_resizes("0", 2)
        job.open(6)
        runs = job.finished()

    leader = runs["0"]
    assert {run.exit_code for run in runs.values()} == {0}, leader.story()
    assert leader.status["world_size"] == 3, leader.story()
    assert [outcome for outcome, _, _ in resizes(leader)] == ["recovered"] * 2, leader.story()
    assert {lost for _, _, lost in resizes(leader)} == {0}, leader.story()
    assert [boundary for _, boundary, _ in resizes(leader)] == [3, 6], leader.story()
    assert leader.counts == [2] * 120, leader.story()


def test_a13_nodes_leave_one_after_the_other_also_the_one_that_leads_and_nothing_is_lost(tmp_path: Path) -> None:
    with Nodes(3) as nodes:
        job = Job(nodes, tmp_path, "1:3", 120, "3,6,9")
        first, second, third = job.begun(1, 2)
        job.open(3)
        second.wait_for_line(0, "step 6 ")
        third.process.send_signal(signal.SIGUSR1)
        job.wait_for_resizes("0", 2)
        job.open(6)
        second.wait_for_line(0, "step 9 ")
        first.process.send_signal(signal.SIGUSR1)
        job.wait_for_resizes("0", 3)
        job.open(9)
        runs = job.finished()

    assert [runs[name].exit_code for name in "012"] == [143, 0, 143], runs["1"].story()
    assert resizes(runs["0"])[:2] == [("recovered", 3, 0), ("recovered", 6, 0)], runs["0"].story()
    assert resizes(runs["1"]) == [("recovered", 9, 0)], runs["1"].story()
    assert runs["1"].counts == [2] * 120, runs["1"].story()


def test_a17_a_lost_node_costs_no_step_and_when_it_comes_back_it_trains_again(tmp_path: Path) -> None:
    with Nodes(2) as nodes:
        job = Job(nodes, tmp_path, "1:2", 120, "3,6,9")
        first, _ = job.begun(1)
        job.open(3)
        first.wait_for_line(0, "step 6 ")
        nodes.end_processes(1)
        del job.launches["1"]
        job.wait_for_size("0", 1)
        job.open(6)
        first.wait_for_line(0, "step 9 ")
        again = job.start(1, "again")
        job.wait_for_resizes("0", 2)
        job.open(9)
        runs = job.finished()

    assert [run.exit_code for run in runs.values()] == [0, 0], runs["0"].story()
    assert [(outcome, lost) for outcome, _, lost in resizes(runs["0"])] == [("recovered", 0)] * 3, runs["0"].story()
    assert runs["0"].counts == [2] * 120, runs["0"].story()
    assert again.process.returncode == 0


def test_a14_hosts_that_the_discovery_command_names_replace_others_and_not_a_bit_differs(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    hosts, script = tmp_path / "hosts", GATED
    hosts.write_text("10.77.0.1\n10.77.0.2\n")
    with Nodes(3) as nodes:

        def start(number: int) -> Launch:
            elastic = ["--elastic", "--save-dir", str(tmp_path / "save"), "--discovery", f"cat {hosts}"]
            return start_ttprun(
                script,
                1,
                tmp_path / str(number),
                options=[*nodes.rendezvous(number, "2:2", host=1), *elastic],
                script_args=["--gate", str(tmp_path / "gate")],
                out=tmp_path / "out",
                within=nodes.inside(number),
            )

        launches = [start(0), start(1)]
        for launch in launches:
            launch.wait_for_line(0, "step 11 ")
        launches.append(start(2))

        def has_happened(event: str) -> bool:
            return any(event in (tmp_path / name / "run/events.jsonl").read_text() for name in "01")

        wait_until(lambda: has_happened("node_waits"))
        hosts.write_text("10.77.0.2\n10.77.0.3\n")
        wait_until(lambda: has_happened("checkpoint_written"))
        (tmp_path / "gate").touch()
        runs = [launch.finish() for launch in launches]

    assert [run.exit_code for run in runs] == [143, 0, 0], runs[1].story()
    assert runs[1].status["nodes"] == ["10.77.0.2", "10.77.0.3"], runs[1].story()
    reference = undisturbed(script, 2)
    assert [one[-1:] for one in runs[1].hashes.values()] == [one[-1:] for one in reference.hashes.values()][:1]
    assert runs[1].final == reference.final, runs[1].story()


def test_a8_a9_with_too_few_nodes_all_wait_and_continue_when_a_node_comes(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    elastic = ["--elastic", "--save-dir", str(tmp_path / "save")]
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path, options=elastic)
        leader = leading(launches)
        nodes.end_processes(1 - leader)
        status = tmp_path / f"{leader}/run/status.json"
        wait_until(lambda: "more for a launcher to take its place" in json.loads(status.read_text())["reason"])
        came = start_gated(nodes, 2, tmp_path, options=elastic)
        (tmp_path / "gate").touch()
        runs = [launches[leader].finish(), came.finish()]

    assert [run.exit_code for run in runs] == [0, 0], runs[0].story()
    assert [(one["rung"], one["steps_lost"]) for one in runs[0].incidents] == [("replace", 0)], runs[0].story()
    assert undisturbed(GATED, 2).final in [run.final for run in runs], runs[0].story()


def test_a8_when_no_node_comes_in_time_the_state_is_saved_and_the_job_may_be_started_again(tmp_path: Path) -> None:
    options = ["--elastic", "--save-dir", str(tmp_path / "save"), "--node-wait-s", "1"]
    with Nodes(2) as nodes:
        launches = at_gate(nodes, range(2), tmp_path, options=options)
        leader = leading(launches)
        nodes.end_processes(1 - leader)
        run = launches[leader].finish()

    assert run.exit_code == 143, run.story()
    assert "1 of at least 2 nodes are there" in run.output, run.story()
    saved = run.status["checkpoint"]
    assert (saved["cause"], saved["reason"], saved["boundary"]) == ("dying gasp", "", 12), run.story()
