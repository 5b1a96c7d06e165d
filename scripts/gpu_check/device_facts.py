"""Parts H and I: texts of real errors, a captured all-reduce. Begin with `errors`, `capture`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import error_texts
from jobs import environment, last_words
from parts import Place, Row, Task

from ttprun.chaos.trial.compare import compare_runs
from ttprun.chaos.trial.drill import Scenario, run_twin

HERE = Path(__file__).resolve().parent
RUN_LIMIT_S = 60.0


def errors(place: Place) -> list[Task] | str:
    """Part H: each error that can be had here, and what ttprun's table makes of it."""
    gpus = len(place.names) if place.kind == "cuda" else 0
    tasks = []
    for provocation in error_texts.CAUSES.values():
        if provocation.devices <= gpus or (place.shares and provocation.devices and gpus):
            tasks.append(Task(provocation.cause, error_texts.LIMIT_S, partial(_error, provocation.cause, place.shares)))
    return tasks


def _error(cause: str, shares: bool, limit_s: float) -> Iterator[Row]:
    text = error_texts.provoke(cause, shares, limit_s)
    outcome = f"{text.text or 'no error'} -> {text.fault or 'not of the device'}"
    yield Row(cause, "ok" if text.is_known else "FAILED", outcome, values={"text": text.text, "fault": text.fault})


def capture(place: Place) -> list[Task] | str:
    """Part I: an all-reduce in a graph, after protection was given up."""
    if place.kind != "cuda":
        return "graphs need a GPU"
    return [Task("a captured all_reduce", 2 * RUN_LIMIT_S, partial(_capture, place))]


def _capture(place: Place, limit_s: float) -> Iterator[Row]:
    scenario = Scenario(
        script=str(HERE / "captured.py"),
        arguments=["--out={folder}/out", *(["--share"] if place.shares else [])],
        environment=environment(),
        launch={"nproc_per_node": place.ranks, "standalone": True},
        faults=["kill:rank=1,step=1000"],  # a scenario has one; these runs have none
        limit_s=min(limit_s, RUN_LIMIT_S),
    )
    twins = [run_twin(scenario, place.folder / f"captured-{kind}", kind) for kind in ("ttprun", "torchrun")]
    ours, theirs = twins
    wrong = [
        f"{kind}: {twin.problem}" for kind, twin in zip(("ttprun", "torchrun"), twins, strict=True) if twin.problem
    ]
    wrong += [f"exit code {ours.exit_code}, torchrun {theirs.exit_code}"] if ours.exit_code or theirs.exit_code else []
    compared = compare_runs([], (ours.folder, theirs.folder), (ours.output, theirs.output))
    wrong += [
        f"{comparison.what} differs: {comparison.detail}" for comparison in compared if not comparison.is_identical
    ]
    outcome = (
        "; ".join(wrong) or f"all lines as under torchrun; protection: {ours.status.protection if ours.status else '?'}"
    )
    details = (*last_words(ours.folder), *last_words(theirs.folder)) if wrong else ()
    yield Row("a captured all_reduce", "FAILED" if wrong else "ok", outcome, details)
