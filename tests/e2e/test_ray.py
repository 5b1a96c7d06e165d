"""configs/ray/launch.py on a Ray cluster whose nodes are processes of this machine, one of which is removed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import SCRIPTS, Undisturbed

GATED = "gated_steps.py"  # 40 steps; waits before step 12 for the gate
LAUNCH = Path(__file__).resolve().parents[2] / "configs" / "ray" / "launch.py"
LIMIT_S = 180.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head on which nothing is placed, and three nodes of one launcher each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="needs ray (the extra `test-ray`)")
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


class RayJob:
    """launch.py, with nodes of one rank each."""

    def __init__(self, cluster: Any, folder: Path, nodes: str, *words: str) -> None:
        self.folder = folder
        options = [
            "--nodes",
            nodes,
            "--gpus",
            "0",
            "--save-dir",
            str(folder / "save"),
            "--run-dir",
            str(folder / "runs"),
        ]
        script = [str(SCRIPTS / GATED), "--out", str(folder / "out"), "--gate", str(folder / "gate")]
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *options, "--", *words, *script],
                env={**harness.environment(), "RAY_ADDRESS": cluster.address, "RAY_DEDUP_LOGS": "0"},
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    @property
    def hashes(self) -> set[str]:
        return {line.rpartition(" ")[2] for line in self.output.splitlines() if "sha256 model" in line}

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What each launcher says, by Ray's name of its node."""
        return {path.parent.name: json.loads(path.read_text()) for path in self.folder.glob("runs/*/status.json")}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < ends_s, self.output
            time.sleep(0.1)

    def wait_at_gate(self) -> None:
        self.wait_until(lambda: "[rank 0] step 11 " in self.output and "[rank 1] step 11 " in self.output)

    def wait_for_spares(self, number: int) -> None:
        said = "waits to take the place of one that is lost"
        self.wait_until(lambda: self.output.count(said) == number)

    def finish(self) -> int:
        """Open the gate and wait for the end; returns the exit code."""
        (self.folder / "gate").touch()
        return self.process.wait(LIMIT_S)


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., RayJob]]:
    """`start(nodes, *options of ttprun)`: a job that stops before step 12 until its end is waited for."""
    jobs: list[RayJob] = []

    def start_one(nodes: str, *words: str) -> RayJob:
        jobs.append(RayJob(cluster, tmp_path, nodes, *words))
        return jobs[-1]

    yield start_one
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


def expected(undisturbed: Undisturbed) -> set[str]:
    """What ranks that nothing disturbs end with."""
    return {line.rpartition(" ")[2] for lines in undisturbed(GATED, 2).hashes.values() for line in lines}


def test_a_node_that_is_removed_is_replaced_no_step_is_lost_and_its_launcher_comes_back_elsewhere(
    cluster: Any, start: Callable[..., RayJob], undisturbed: Undisturbed
) -> None:
    job = start("2:3")
    job.wait_at_gate()
    job.wait_for_spares(1)
    training = [node for node, status in job.statuses().items() if status["ranks"]]
    (lost,) = [node for node in cluster.worker_nodes if node.node_id.startswith(training[0])]

    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    job.wait_for_spares(2)
    code = job.finish()

    assert code == 0, job.output
    assert job.hashes == expected(undisturbed)
    (incident,) = next(status["incidents"] for status in job.statuses().values() if status["incidents"])
    assert (incident["kind"], incident["rung"], incident["steps_lost"]) == ("node-lost", "replace", 0)
