"""The files for schedulers (configs/slurm, configs/kubernetes) fit the exit codes; stand-ins take Slurm's part."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttprun.agent.launcher.launch import SCRIPT_FAILED
from ttprun.agent.launcher.outcome import DO_NOT_RESTART
from ttprun.early_signals import exit_code_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
USAGE = 2
PREEMPTED = exit_code_of(signal.SIGTERM)
# Started as `srun ... ttprun ...`: its last words, and its exit code once it gets SIGUSR1, or at once.
SRUN = """#!/bin/bash
echo "$@" > "$NOTES/started"
trap 'exit 143' USR1
touch "$NOTES/runs"
[ -n "$CODE" ] && exit "$CODE"
while true; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "$2" >> "$NOTES/requeued" ;;
esac
"""


@pytest.fixture
def batch(tmp_path: Path) -> Any:
    """`batch(code)`: the batch shell of a job whose launchers end with that code, or "" if they wait for a signal."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2", "NOTES": str(tmp_path)}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(code: str) -> subprocess.Popen[bytes]:
        command = ["bash", str(CONFIGS / "slurm" / "train.sbatch"), "train.py", "--lr", "0.1"]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | job | path | {"CODE": code})

    return start


def test_a_slurm_job_that_is_reported_of_its_time_limit_is_queued_again(batch: Any, tmp_path: Path) -> None:
    shell = batch("")
    while not (tmp_path / "runs").exists():
        time.sleep(0.01)

    shell.send_signal(signal.SIGUSR1)  # to the batch shell alone, as --signal=B:USR1@120 does

    assert shell.wait(10) == PREEMPTED
    assert (tmp_path / "requeued").read_text() == "77\n"
    started = (tmp_path / "started").read_text()
    assert "--nnodes 2" in started
    assert "--rdzv-endpoint node-a:29400" in started
    assert started.endswith("train.py --lr 0.1\n")


@pytest.mark.parametrize("code", [0, SCRIPT_FAILED, USAGE, DO_NOT_RESTART])
def test_a_slurm_job_that_a_restart_would_not_help_is_not_queued_again(batch: Any, tmp_path: Path, code: int) -> None:
    assert batch(str(code)).wait(10) == code
    assert not (tmp_path / "requeued").exists()


def test_a_jobset_fails_with_the_exit_codes_that_a_restart_would_not_help() -> None:
    found = yaml.safe_load((CONFIGS / "kubernetes" / "jobset.yaml").read_text())["spec"]

    (rule,) = found["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["values"] == sorted([SCRIPT_FAILED, USAGE, DO_NOT_RESTART])
    assert found["failurePolicy"]["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]


def test_a_pytorchjob_has_a_fixed_number_of_nodes_and_goes_by_the_exit_code() -> None:
    found = yaml.safe_load((CONFIGS / "kubernetes" / "pytorchjob.yaml").read_text())["spec"]

    assert found["elasticPolicy"]["minReplicas"] == found["elasticPolicy"]["maxReplicas"]
    assert found["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"  # 1-127: permanent
    assert max(SCRIPT_FAILED, USAGE, DO_NOT_RESTART) < 128 <= PREEMPTED
