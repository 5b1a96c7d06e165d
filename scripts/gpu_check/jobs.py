"""Jobs that are broken on purpose: kills in each phase, kernels that are not reproducible, a hang. Parts C, D, E and K.

Weights and output are compared with those of a run under torchrun that nothing disturbed; one such run serves all
faults of a job. Begin with `repairs`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parts import NotDoneError, Place, Row, Task

from ttprun.chaos.trial.compare import compare_runs
from ttprun.chaos.trial.drill import Scenario, problems_of, run_twin
from ttprun.chaos.trial.kills import pair
from ttprun.chaos.trial.twins import Twin

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
RUN_LIMIT_S = 90.0  # of one run
HANG_TIMEOUT_S = 10
WEIGHTS = "out/final.pt"
REPAIRED = frozenset({"replace", "rerun"})
ANY_BACK = REPAIRED | {"rewind"}
SHOWN_LINES = 25
MORE = {
    "cuda": "barrier,loss,objects,syncbn,accumulation,fp16",
    "npu": "barrier,loss,objects,syncbn,accumulation,fp16",
    "cpu": "barrier,loss,objects,accumulation",
}
STYLES = {
    "one loop in the module": ("while_true_get_batch.py", ("--max_iters=24",)),
    "epochs over a DataLoader": ("epochs_dataloader.py", ("--epochs=2",)),
    "a Trainer class": ("trainer_class.py", ("--epochs=2",)),
    "two optimizers, iter() and next()": ("iter_next_two_optimizers.py", ("--iterations=24",)),
}


def environment() -> dict[str, str]:
    """What all runs have; what is on PYTHONPATH stays there, behind this checkout."""
    paths = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    # Deterministic matrix products of cuBLAS need room of a fixed size.
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


class Job:
    """A script with its arguments, in a place; its undisturbed run is made once, when it is first asked for.

    script      in tests/scripts
    reproduces  whether two runs of it are the same bit for bit
    """

    def __init__(
        self, name: str, script: str, arguments: tuple[str, ...], place: Place, reproduces: bool = True
    ) -> None:
        self.name, self.place, self.reproduces = name, place, reproduces
        self._script, self._arguments = script, arguments
        self._lock = threading.Lock()
        self._undisturbed: Twin | None = None

    def scenario(self, limit_s: float, fault: str = "", **settings: object) -> Scenario:
        """A run of it under ttprun.

        settings  of ttprun
        """
        return Scenario(
            script=str(SCRIPTS / self._script),
            arguments=["--out={folder}/out", *self._arguments],
            environment=environment(),
            launch={"nproc_per_node": self.place.ranks, "standalone": True},  # they run side by side
            ttprun=settings,
            faults=[fault or "kill:rank=1,step=8"],
            compare=[WEIGHTS],
            limit_s=limit_s,
        )

    def undisturbed(self, limit_s: float) -> Twin:
        """Its run under torchrun. Raises NotDoneError if that failed."""
        with self._lock:
            if self._undisturbed is None:
                self._undisturbed = run_twin(self.scenario(limit_s), self.folder("torchrun"), "torchrun")
        twin = self._undisturbed
        if twin.problem or twin.exit_code:
            why = twin.problem or f"exit code {twin.exit_code}"
            said = last_words(twin.folder)
            cause = next((line for line in said if line.startswith("rank") and "Error: " in line), "see below")
            raise NotDoneError(f"under torchrun: {why}; {cause}", said)
        return twin

    def folder(self, *names: str) -> Path:
        """Where a run of it is kept."""
        return self.place.folder.joinpath(*(re.sub(r"\W+", "-", name) for name in (self.name, *names)))


@dataclass(frozen=True)
class Trial:
    """One fault in a job.

    rungs     what is good enough
    settings  of ttprun
    """

    job: Job
    fault: str
    rungs: frozenset[str] = REPAIRED
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """What the report calls it."""
        return f"{self.job.name}: {self.fault}"

    def task(self) -> Task:
        """It, as a task: both runs may be made in it."""
        return Task(self.name, 2 * RUN_LIMIT_S, self.run)

    def run(self, limit_s: float) -> Iterator[Row]:
        """Break the job, and judge what came of it."""
        began_s = time.monotonic()
        undisturbed = self.job.undisturbed(min(limit_s, RUN_LIMIT_S * self.job.place.patience))
        left_s = max(1.0, limit_s - (time.monotonic() - began_s))
        scenario = self.job.scenario(
            min(left_s, RUN_LIMIT_S * self.job.place.patience), self.fault, **dict(self.settings)
        )
        disturbed = run_twin(scenario, self.job.folder(self.fault), "disturbed")
        injections = pair(disturbed.events)
        wrong = problems_of(scenario, disturbed, undisturbed, injections)
        incidents = disturbed.status.incidents if disturbed.status else ()
        prints_again = any(incident.rung not in REPAIRED for incident in incidents)
        wrong += differences(self.job, disturbed, undisturbed, has_output=not prints_again)
        for incident in incidents:
            if incident.rung not in self.rungs:
                wrong.append(f"{incident.rung or 'nothing'} where {' or '.join(sorted(self.rungs))} was expected")
        if not incidents:
            wrong.append("there was no incident")
        times = "; ".join(described(incident) for incident in incidents)
        same = "weights identical" if self.job.reproduces else "replicas identical"
        outcome = f"{times}; {'; '.join(wrong) if wrong else same}"
        values = {
            "incidents": [vars(incident) for incident in incidents],
            "wrong": wrong,
            "events": len(disturbed.events),
        }
        details = tuple(f"{incident.rung}: {incident.reason}" for incident in incidents) + (
            last_words(disturbed.folder) if wrong else ()
        )
        yield Row(self.name, "FAILED" if wrong else "ok", outcome, details, values)


def repairs(place: Place) -> list[Task] | str:
    """Part C: a rank is killed in each phase of a step; and nothing happens, and all is as under torchrun."""
    ddp = layout(place, "ddp", MORE[place.kind])
    own = layout(place, "own", "barrier,loss")
    tasks = [trial.task() for job in (ddp, own) for trial in kills(job)]
    tasks[1:1] = [
        Task(f"{job.name}: nothing happens", 2 * RUN_LIMIT_S, partial(leave_alone, job)) for job in (ddp, own)
    ]
    if place.kind != "cpu":
        # What a rank alone holds on a device has no mirror yet: back to a snapshot is what is expected of FSDP2 today.
        fsdp2 = layout(place, "fsdp2", "barrier,loss")
        tasks.append(Trial(fsdp2, "kill:rank=1,step=8,phase=backward", ANY_BACK).task())
    return tasks


def kills(job: Job) -> Iterator[Trial]:
    """A job's kills: of both ranks, in four phases."""
    for rank, phase in ((0, "backward"), (1, "collective"), (1, "forward"), (0, "in_step")):
        yield Trial(job, f"kill:rank={rank},step=8,phase={phase}")


def noise(place: Place) -> list[Task] | str:
    """Part D: kernels that are not reproducible; a rank is replaced all the same, and the replicas stay equal."""
    if place.kind == "cpu":
        return "with one thread a CPU's kernels are reproducible"
    job = layout(place, "ddp", "noise,fp16,loss", reproduces=False)
    return [Trial(job, f"kill:rank=1,step=8,phase={phase}").task() for phase in ("backward", "forward")]


def hang(place: Place) -> list[Task] | str:
    """Part E: a rank stops; on the simulated device its memory fails, too."""
    job = layout(place, "ddp", "loss")
    settings = (("hang_timeout_s", HANG_TIMEOUT_S),)
    tasks = [Trial(job, "stop:rank=1,step=8,phase=backward", settings=settings).task()]
    if place.kind == "npu":
        tasks.append(Trial(job, "uce-high:rank=1,step=8,phase=forward").task())
    return tasks


def styles(place: Place) -> list[Task] | str:
    """Part K: scripts of four kinds, one rank killed."""
    if place.shares and place.kind == "cuda":
        return "these scripts do not tell NCCL that their ranks share a GPU"
    further = (f"--device={place.kind}", *((f"--backend={place.backend}",) if place.kind != "cpu" else ()))
    jobs = [Job(name, script, (*arguments, *further), place) for name, (script, arguments) in STYLES.items()]
    return [Trial(job, "kill:rank=1,step=5,phase=backward").task() for job in jobs]


def layout(place: Place, name: str, more: str, steps: int = 24, reproduces: bool = True) -> Job:
    """tests/scripts/device_layouts.py with one of its layouts."""
    arguments = [f"--layout={name}", f"--steps={steps}", *([f"--with={more}"] if more else [])]
    arguments += ["--share"] if place.shares else []
    title = f"{name}{f' with {more}' if more else ''}"
    return Job(title, "device_layouts.py", tuple(arguments), place, reproduces)


def leave_alone(job: Job, limit_s: float) -> Iterator[Row]:
    """A run under ttprun in which nothing happens."""
    began_s = time.monotonic()
    undisturbed = job.undisturbed(min(limit_s, RUN_LIMIT_S * job.place.patience))
    left_s = max(1.0, limit_s - (time.monotonic() - began_s))
    ours = run_twin(job.scenario(min(left_s, RUN_LIMIT_S * job.place.patience)), job.folder("ttprun"), "ttprun")
    wrong = [ours.problem] if ours.problem else differences(job, ours, undisturbed)
    if ours.exit_code:
        wrong.append(f"exit code {ours.exit_code}")
    protection = ours.status.protection if ours.status else "unknown"
    if protection != "on":
        wrong.append(f"protection: {protection}")
    outcome = (
        "; ".join(wrong) or f"protected, weights identical; {ours.took_s:.1f} s, torchrun {undisturbed.took_s:.1f} s"
    )
    values = {"took_s": ours.took_s, "torchrun_s": undisturbed.took_s, "protection": protection, "wrong": wrong}
    name = f"{job.name}: nothing happens"
    yield Row(name, "FAILED" if wrong else "ok", outcome, last_words(ours.folder) if wrong else (), values)


def differences(job: Job, ours: Twin, undisturbed: Twin, has_output: bool = True) -> list[str]:
    """What must be the same and is not, a sentence each: weights and output; or the digests that the ranks print.

    has_output  whether the output is compared, too
    """
    if job.reproduces:
        outputs = (ours.output, undisturbed.output) if has_output else ({}, {})
        folders = (ours.folder, undisturbed.folder)
        compared = compare_runs([WEIGHTS], folders, outputs)
        return [
            f"{comparison.what} differs: {comparison.detail}" for comparison in compared if not comparison.is_identical
        ]
    digests = {rank: [line.split()[-1] for line in lines if " sha256 " in line] for rank, lines in ours.output.items()}
    if len(digests) == job.place.ranks and len({tuple(lines) for lines in digests.values()}) == 1:
        return [] if next(iter(digests.values())) else ["no rank printed a digest of its weights"]
    return [f"the replicas' weights differ: {digests}"]


def described(incident: object) -> str:
    """An incident's rung and the seconds of its phases."""
    names = ("detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue", "total")
    phases = {name: getattr(incident, f"{name}_s", None) for name in names}
    times = ", ".join(f"{name} {value:.2f}" for name, value in phases.items() if value is not None)
    return f"{getattr(incident, 'rung', '')} ({times})"


def last_words(folder: Path) -> tuple[str, ...]:
    """The ends of what a launcher and its ranks have written."""
    lines: list[str] = []
    for path in (folder / "launcher.log", *sorted(folder.glob("logs/*/attempt_*/*/stderr.log"))):
        if path.exists():
            said = path.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in said[:-SHOWN_LINES] if "Error: " in line][:2]
            name = path.name if path.parent == folder else f"rank {path.parent.name}"
            lines += [f"{name}: {line[:300]}" for line in (*errors, *said[-SHOWN_LINES:]) if line.strip()]
    return tuple(lines)
