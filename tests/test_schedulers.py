"""The files for Kubernetes fit its schemas and the exit codes; that for Slurm runs on a real one in test_slurm.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttprun.agent.launcher.launch import SCRIPT_FAILED
from ttprun.agent.launcher.outcome import DO_NOT_RESTART
from ttprun.config import Config
from ttprun.early_signals import exit_code_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "kubernetes"
SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
KUBERNETES = "1.31"  # pod failure policies are stable since then
USAGE = 2
PREEMPTED = exit_code_of(signal.SIGTERM)


def resources(name: str) -> list[dict[str, Any]]:
    """What a file describes, one after the other."""
    return list(yaml.safe_load_all((CONFIGS / name).read_text()))


def job_sets() -> list[Any]:
    """Each JobSet's specification, and the name of the container in which ttprun runs."""
    jobset, (runtime, _) = resources("jobset.yaml")[0], resources("trainer.yaml")
    return [
        pytest.param(jobset["spec"], "ttprun", id="JobSet"),
        pytest.param(runtime["spec"]["template"]["spec"], "node", id="Trainer"),
    ]


def parts_of(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Jobs and Pods that are made of a resource of another kind."""
    spec = resource["spec"]
    if resource["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    for replicated in spec.get("replicatedJobs", ()):
        job = replicated["template"]["spec"]
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": job["template"]["spec"]}
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": replica["template"]["spec"]}


def check(resource: dict[str, Any]) -> None:
    """Raises a ValidationError if something in it is not as the schemas have it. Unknown fields are errors."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (the extra `test`)")
    jsonschema = pytest.importorskip("jsonschema")  # which it needs itself
    kind = {"$ref": f"#/$defs/{SCHEMAS['kinds'][resource['kind']]}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(kind).validate(resource)
    for part in parts_of(resource):
        kubernetes.validate(part, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_all_fields_are_those_of_the_published_schemas(name: str) -> None:
    for resource in resources(name):
        check(resource)


@pytest.mark.parametrize(("spec", "container"), job_sets())
def test_a_lost_pod_comes_back_alone_and_some_exit_codes_end_the_job(spec: Any, container: str) -> None:
    job = spec["replicatedJobs"][0]["template"]["spec"]

    ends, ignored = job["podFailurePolicy"]["rules"]
    assert (ends["action"], ends["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert ends["onExitCodes"]["values"] == sorted([SCRIPT_FAILED, USAGE, DO_NOT_RESTART])
    assert ends["onExitCodes"]["containerName"] == container
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert job["backoffLimit"] == 100
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs it
    policy = spec["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate"
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]


@pytest.mark.parametrize(("spec", "container"), job_sets())
def test_saving_ends_before_kubernetes_kills_and_variables_are_settings_of_ours(spec: Any, container: str) -> None:
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (found,) = pod["containers"]

    variables = {one["name"]: one.get("value") for one in found["env"]}
    ours = {name.removeprefix("TTPRUN_").lower() for name in variables if name.startswith("TTPRUN_")}
    assert found["name"] == container
    assert variables["TTPRUN_GRACE_S"] == str(pod["terminationGracePeriodSeconds"])
    assert ours <= set(Config.model_fields)


def test_two_nodes_train_and_one_is_a_spare() -> None:
    (jobset,), (runtime, job) = resources("jobset.yaml"), resources("trainer.yaml")

    pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    trainer = job["spec"]["trainer"]
    assert [pods["completions"], pods["parallelism"], trainer["numNodes"], runtime["spec"]["mlPolicy"]["numNodes"]] == [
        3
    ] * 4
    assert "--nnodes=2:3" in container["args"]
    assert "--nnodes=2:3" in trainer["args"]  # stronger than the PET_NNODES=3 of the Trainer
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_a_pytorchjob_has_a_fixed_number_of_nodes_and_goes_by_the_exit_code() -> None:
    spec = resources("pytorchjob.yaml")[0]["spec"]

    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"]
    assert "nProcPerNode" not in spec["elasticPolicy"]  # deprecated since 1.7
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"  # 1-127: permanent
    assert max(SCRIPT_FAILED, USAGE, DO_NOT_RESTART) < 128 <= PREEMPTED


def test_systemd_starts_again_what_may_be_and_saving_ends_before_it_kills() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(CONFIGS.parent / "systemd" / "ttprun.service")
    service = unit["Service"]

    assert service["Restart"] == "on-failure"
    final = {SCRIPT_FAILED, USAGE, DO_NOT_RESTART, exit_code_of(signal.SIGINT)}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == final
    assert service["Environment"] == f"TTPRUN_GRACE_S={service['TimeoutStopSec']}"
