"""Launchers in the environment that Kubeflow's Trainer sets: variables of a static rendezvous. Here on one machine."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.e2e.harness import Launch, Run, StartTtprun, Undisturbed, assert_no_orphans
from tests.nodes import Nodes, free_port

GATED = "gated_steps.py"  # 40 steps; waits before step 12 for the gate


class Pods:
    """The pods of a job, of one rank each, which share a folder.

    nodes      one for each pod; None: all pods are on this machine, and share its ports
    numbered   of each index the newest launcher
    """

    def __init__(
        self, start_ttprun: StartTtprun, folder: Path, *options: str, size: int = 2, nodes: Nodes | None = None
    ) -> None:
        self._start, self._folder, self._nodes = start_ttprun, folder, nodes
        self._options = ["--save-dir", str(folder / "save"), *options]
        self._variables = {
            "PET_NNODES": size,
            "PET_NPROC_PER_NODE": 1,
            "PET_MASTER_ADDR": "127.0.0.1" if nodes is None else nodes.addresses[0],
            "PET_MASTER_PORT": free_port(),
        }
        self.numbered: dict[int, Launch] = {}

    def start(self, index: int) -> Launch:
        variables = self._variables | {"PET_NODE_RANK": index}
        within = ["env"]
        if self._nodes is not None:
            variables["PET_LOCAL_ADDR"] = self._nodes.addresses[index]
            within = self._nodes.inside(index)
        self.numbered[index] = self._start(
            GATED,
            1,
            options=self._options,
            script_args=["--gate", str(self._folder / "gate")],
            out=self._folder / "out",
            within=[*within, *(f"{name}={value}" for name, value in variables.items())],
        )
        return self.numbered[index]

    def start_at_gate(self) -> None:
        """Start the first two, and let them train up to the gate."""
        for index in range(2):
            self.start(index)
        for launch in self.numbered.values():
            launch.wait_for_line(0, "step 11 ")

    def kill(self, index: int) -> None:
        self.numbered[index].kill_agent()
        self.numbered[index].finish()

    def status(self, index: int) -> dict[str, object]:
        run_dir = self.numbered[index].run_dir
        assert run_dir is not None
        return dict(json.loads((run_dir / "status.json").read_text()))

    def finish(self) -> list[Run]:
        """Open the gate, and wait for the end of the newest launchers."""
        (self._folder / "gate").touch()
        return [self.numbered[index].finish() for index in sorted(self.numbered)]


def assert_trained_as(reference: Run, runs: list[Run]) -> None:
    for run in runs:
        assert run.exit_code == 0, run.story()
        assert_no_orphans(run)
    hashes = chain(*chain(*(run.hashes.values() for run in runs)))
    assert sorted(hashes) == sorted(chain(*reference.hashes.values())), runs[0].story()


@pytest.mark.parametrize(("index", "options"), [(1, []), (0, ["--run-id", "train"])], ids=["second", "with the store"])
def test_a_pod_that_comes_back_with_its_index_takes_its_place_and_no_step_is_lost(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path, index: int, options: list[str]
) -> None:
    pods = Pods(start_ttprun, tmp_path, "--node-wait-s", "120", *options)
    pods.start_at_gate()
    lost = pods.status(index)["node"]

    pods.kill(index)
    pods.start(index)
    runs = pods.finish()

    assert_trained_as(undisturbed(GATED, 2), runs)
    leader = next(run for run in runs if run.status["is_leading"])
    assert [(one["kind"], one["rung"], one["ranks"]) for one in leader.incidents] == [("node-lost", "replace", [lost])]
    assert leader.incidents[0]["steps_lost"] == 0, leader.story()
    assert not list(tmp_path.glob("save/leader-*")), "what a job that has ended leaves"
