"""configs/slurm/train.sbatch on a real Slurm: signals, lost launchers and nodes, and what becomes of the job."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import slurm
from tests.e2e import harness
from tests.e2e.harness import SCRIPTS, Undisturbed

pytestmark = pytest.mark.skipif(not slurm.is_installed(), reason="needs Debian's slurm-wlm and munge (see .ci/run)")
GATED = "gated_steps.py"  # 40 steps; waits before step 12 for the gate
PREEMPTED = 143


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    """Three nodes."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    found = slurm.Slurm(folder, harness.environment(), KILL_WAIT="20")
    yield found
    found.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(cluster: slurm.Slurm, tmp_path: Path) -> Iterator[Callable[..., slurm.Job]]:
    """`start(options, NNODES=...)`: a job that stops before step 12 until `open_gate` is called."""
    jobs: list[slurm.Job] = []

    def submit(options: list[str] | None = None, **variables: str) -> slurm.Job:
        folder = tmp_path / str(len(jobs))
        words = [str(SCRIPTS / GATED), "--out", str(folder / "out"), "--gate", str(folder / "gate")]
        jobs.append(slurm.Job(cluster, folder, words, options, **variables))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.end()


def open_gate(job: slurm.Job) -> None:
    (job.folder / "gate").touch()


def wait_at_gate(job: slurm.Job, ranks: int = 2) -> None:
    for rank in range(ranks):
        job.wait_for_output(f"[rank {rank}] step 11 ")


@contextmanager
def out_of_service(cluster: slurm.Slurm, node: str, state: str) -> Iterator[None]:
    """A node is down or drained as long as this lasts; one that answers Slurm again may be back before."""
    cluster.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
    try:
        yield
    finally:
        if cluster.run("sinfo", "--noheader", f"--nodes={node}", "--format=%t").startswith(("down", "dr")):
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def hashes(output: str) -> set[str]:
    return {line.rpartition(" ")[2] for line in output.splitlines() if "sha256 model" in line}


def expected(undisturbed: Undisturbed, ranks: int = 2) -> set[str]:
    """What ranks that nothing disturbs end with."""
    return {line.rpartition(" ")[2] for lines in undisturbed(GATED, ranks).hashes.values() for line in lines}


def test_a_cancelled_job_is_cancelled_with_a_checkpoint_and_not_queued_again(start: Callable[..., slurm.Job]) -> None:
    job = start()
    wait_at_gate(job)

    job.slurm.run("scancel", job.id)

    assert job.finish() == "CANCELLED", job.output
    assert job.checkpoints == ["step-00000012"], job.output
    assert job.fields["Restarts"] == "0"
    assert (job.outcome["exit_code"], job.outcome["step"]) == (PREEMPTED, 12)
    assert job.output.count("ttprun: the job has ended: ended by SIGTERM") == 1, job.output
    assert "no checkpoint was written" not in job.output
    assert job.output.count("a lost rank is replaced on its node") == 1, "a line of each node"


def test_a_job_that_is_told_of_its_time_limit_goes_on_in_its_next_start(
    start: Callable[..., slurm.Job], undisturbed: Undisturbed
) -> None:
    job = start()
    wait_at_gate(job)

    job.slurm.run("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@120 does
    job.start_again()
    open_gate(job)

    assert job.finish() == "COMPLETED", job.output
    assert job.fields["Restarts"] == "1"
    assert hashes(job.output) == expected(undisturbed)
    assert job.output.count("[rank 0] step 11 ") == 1, f"a step was run again: {job.output}"


def test_a_job_that_has_lost_a_launcher_and_finished_is_done_and_stays_so(
    start: Callable[..., slurm.Job], undisturbed: Undisturbed
) -> None:
    job = start(["--nodes=3"], NNODES="2:3")
    wait_at_gate(job)
    job.wait_for_output("waits to take the place of one that is lost")
    trains = [name for name, status in job.statuses().items() if status["ranks"]]

    job.launchers()[trains[0]].send_signal(signal.SIGKILL)
    open_gate(job)

    assert job.finish() == "COMPLETED", job.output
    assert hashes(job.output) == expected(undisturbed)
    assert "takes the place of the lost node" in job.output, job.output
    job.slurm.run("scontrol", "requeue", job.id)
    job.start_again()
    assert job.finish() == "COMPLETED"
    assert f"ttprun: job {job.id} is done" in job.output
    assert job.output.count("[rank 0] step 0 ") == 1, "it was trained again"


def test_a_job_that_gets_no_further_from_start_to_start_ends_with_93(start: Callable[..., slurm.Job]) -> None:
    """Its launchers are told to end before their ranks have done a step: its time is too short for its start."""
    job = start()
    for number in range(3):
        job.wait_until(lambda: bool(job.launchers()), "launchers")
        job.slurm.run("scancel", "--batch", "--signal=USR1", job.id)
        job.wait_until(lambda number=number: job.fields["Restarts"] == str(number + 1), "queued again")
        job.start_again()

    assert job.finish() == "FAILED", job.output
    assert job.fields["ExitCode"].startswith("93:"), job.output


@pytest.mark.parametrize("leads", [True, False], ids=["that leads", "that follows"])
def test_a_node_that_goes_down_is_replaced_by_a_spare_one(
    start: Callable[..., slurm.Job], undisturbed: Undisturbed, cluster: slurm.Slurm, tmp_path: Path, leads: bool
) -> None:
    launcher = tmp_path / "ttprun"  # the batch script's node comes last: Slurm fails a job that loses that one
    has_come = """[ "$(grep -l '"rank": ' ttprun-runs/*/*/status.json | wc -l)" = 2 ]"""
    first = f"[ $SLURM_NODEID != 0 ] || until {has_come}; do sleep 0.2; done"
    launcher.write_text(f'#!/bin/bash\n{first}\nexec {Path(sys.executable).parent}/ttprun "$@"')
    launcher.chmod(0o700)
    job = start(["--nodes=3"], NNODES="2:3", PATH=f"{tmp_path}:{cluster.environment['PATH']}")
    job.wait_for_output("waits to take the place of one that is lost")
    wait_at_gate(job)
    (node,) = [name for name, status in job.statuses().items() if status["ranks"] and status["is_leading"] is leads]
    with out_of_service(cluster, node, "DOWN"):
        open_gate(job)
        assert job.finish() == "COMPLETED", job.output

    assert hashes(job.output) == expected(undisturbed)
    assert job.fields["Restarts"] == "0"
    assert "takes the place of the lost node" in job.output, job.output
