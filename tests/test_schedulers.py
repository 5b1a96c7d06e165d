"""The files for Kubernetes fit the exit codes; that for Slurm runs on a real one in tests/e2e/test_slurm.py."""

from __future__ import annotations

import signal
from pathlib import Path

import yaml

from ttprun.agent.launcher.launch import SCRIPT_FAILED
from ttprun.agent.launcher.outcome import DO_NOT_RESTART
from ttprun.early_signals import exit_code_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
USAGE = 2
PREEMPTED = exit_code_of(signal.SIGTERM)


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
