"""Break one rank of a script on its device, and compare the weights with torchrun's. Begin with `try_one`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttprun.chaos.drill.rehearsal import DrillReport, rehearse
from ttprun.chaos.drill.scenario import Scenario

REPOSITORY = Path(__file__).resolve().parents[2]
# Before a script has saved anything with which it would begin.
FAULTS = {
    "kill": "kill:rank={rank},step=5,phase=backward",
    "hang": "stop:rank={rank},step=5,phase=backward",
    "memory": "uce-high:rank={rank},step=5,phase=forward",
}
HANG_TIMEOUT_S = 20
REPAIRED = {"replace", "rerun"}
# Deterministic matrix products of cuBLAS need room of a fixed size.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
STYLES = {
    "one loop in the module": ("while_true_get_batch.py", ("--max_iters=24",)),
    "epochs over a DataLoader": ("epochs_dataloader.py", ("--epochs=2",)),
    "a Trainer class": ("trainer_class.py", ("--epochs=2",)),
    "two optimizers, iter() and next()": ("iter_next_two_optimizers.py", ("--iterations=24",)),
}
WEIGHTS = "out/final.pt"


@dataclass(frozen=True)
class Device:
    """What the ranks train on.

    kind     "cuda", "npu" or "cpu"
    names    of the devices that torch can use; empty on the CPU
    """

    kind: str
    names: tuple[str, ...]

    def backend(self, ranks: int) -> str:
        """What the ranks communicate by: NCCL if each has a GPU of its own, else gloo."""
        if self.kind == "npu":
            return "hccl"
        return "nccl" if self.kind == "cuda" and len(self.names) >= ranks else "gloo"


@dataclass(frozen=True)
class Trial:
    """What is tried: one style of script, and what breaks its last rank.

    fault  a key of FAULTS
    """

    style: str
    ranks: int
    backend: str
    fault: str

    def __str__(self) -> str:
        return f"{self.style}, {self.ranks} ranks, {self.backend}, {self.fault}"


@dataclass(frozen=True)
class Result:
    """What came of a trial.

    rung       that answered the fault, "" if none did
    took_s     from the fault to the end of the recovery
    identical  whether the weights are torchrun's, bit for bit
    notes      why the rank was not repaired, and what is wrong, a sentence each
    """

    trial: Trial
    has_passed: bool
    rung: str = ""
    took_s: float | None = None
    identical: bool = False
    notes: tuple[str, ...] = ()


def try_one(trial: Trial, device: Device, root: Path, limit_s: float) -> Result:
    """Run a style twice, undisturbed under torchrun and broken under ttprun, at most `limit_s` each.

    root   keeps both runs, in a folder of their own
    """
    shown = rehearse(scenario_of(trial, device, limit_s), folder_of(trial, root), lambda text: None)
    wrong = tuple(faults_of(shown, is_strict=device.kind != "cuda"))
    (one,) = shown.injections or [None]
    incidents = shown.disturbed.status.incidents if shown.disturbed.status else ()
    why_not = tuple(f"not repaired: {incident.reason}" for incident in incidents if incident.rung not in REPAIRED)
    return Result(
        trial,
        has_passed=not wrong,
        rung=(one.rung if one else "") or "",
        took_s=one.recover_s if one else None,
        identical=any(found.what == WEIGHTS and found.is_identical for found in shown.comparisons),
        notes=why_not + wrong,
    )


def scenario_of(trial: Trial, device: Device, limit_s: float) -> Scenario:
    """A trial as a drill."""
    script, arguments = STYLES[trial.style]
    backends = [f"--backend={trial.backend}"] if trial.backend != "gloo" else []
    return Scenario(
        script=str(REPOSITORY / "tests" / "scripts" / script),
        arguments=["--out={folder}/out", *arguments, f"--device={device.kind}", *backends],
        environment=ENVIRONMENT,
        launch={"nproc_per_node": trial.ranks, "max_restarts": 1},
        ttprun={"hang_timeout_s": HANG_TIMEOUT_S} if trial.fault == "hang" else {},
        faults=[FAULTS[trial.fault].format(rank=trial.ranks - 1)],
        compare=[WEIGHTS],
        limit_s=limit_s,
    )


def folder_of(trial: Trial, root: Path) -> Path:
    """Where a trial's runs are kept."""
    return root / f"{Path(STYLES[trial.style][0]).stem}-{trial.ranks}-{trial.backend}-{trial.fault}"


def faults_of(shown: DrillReport, is_strict: bool) -> Iterator[str]:
    """What is wrong with a rehearsal, a sentence each.

    is_strict   the rank must have been repaired, and the output be the same: else that is only reported
    """
    yield from shown.problems
    rungs = {one.rung for one in shown.injections}
    for one in shown.comparisons:
        if not one.is_identical and (one.what == WEIGHTS or rungs <= REPAIRED):
            yield f"{one.what} differs: {one.detail}"
    if is_strict and not (rungs and rungs <= REPAIRED):
        yield f"the rank was not repaired ({', '.join(sorted(filter(None, rungs))) or 'nothing was done'})"
