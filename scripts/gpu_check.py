"""What ttprun does with tensors on a GPU: kill and recover in four styles of scripts, and the cost of a step.

    scripts/gpu_check.sh                      all of it, on the GPU; several ranks share one if there are fewer
    scripts/gpu_check.sh --device cpu         the same on the CPU, to see that this check itself works

Each style runs undisturbed under torchrun, and under ttprun with one rank killed in mid-step; both are deterministic,
so their weights must be the same bit for bit. A rank that is not replaced, but restarted with all others, is reported
with its reason, and fails on the CPU only. NCCL gets one rank a GPU. The step is one of GPT-2's size. Exit code:
0 all passed, 1 something failed, 2 there is no GPU. Begin with main().
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "bench")]

from runs import (  # noqa: E402
    LAUNCHERS,
    TORCHRUN,
    TTPRUN,
    BenchmarkError,
    Run,
    headline,
    machine,
    positive,
    print_table,
    spread,
    told,
)

from ttprun.chaos.drill.rehearsal import Rehearsal, rehearse  # noqa: E402
from ttprun.chaos.drill.scenario import Scenario  # noqa: E402

KILL = "kill:rank={rank},step=5,phase=backward"  # before a script has saved anything with which it would begin
# Deterministic matrix products of cuBLAS need room of a fixed size.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
STYLES = {
    "one loop in the module": ("while_true_get_batch.py", ("--max_iters=24",)),
    "epochs over a DataLoader": ("epochs_dataloader.py", ("--epochs=2",)),
    "a Trainer class": ("trainer_class.py", ("--epochs=2",)),
    "two optimizers, iter() and next()": ("iter_next_two_optimizers.py", ("--iterations=24",)),
}
NCCL_STYLE = "one loop in the module"
WEIGHTS = "out/final.pt"
LIMIT_S = 600.0


class NoGpuError(Exception):
    """There is nothing to check here; the message says what is missing."""


def count_gpus() -> int:
    """GPUs that torch can use. Raises NoGpuError if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    why = "finds none (see nvidia-smi)" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
    raise NoGpuError(f"no GPU: torch {why}; run this where there is one, or with --device cpu")


def break_one(style: str, options: argparse.Namespace, ranks: int, root: Path, backend: str) -> Rehearsal:
    """Run a style twice, undisturbed and with its last rank killed."""
    script, arguments = STYLES[style]
    backends = ["--backend=nccl"] if backend == "nccl" else []
    scenario = Scenario(
        script=str(REPOSITORY / "tests" / "scripts" / script),
        arguments=["--out={folder}/out", *arguments, f"--device={options.device}", *backends],
        environment=ENVIRONMENT,
        launch={"nproc_per_node": ranks, "max_restarts": 1},
        faults=[KILL.format(rank=ranks - 1)],
        compare=[WEIGHTS],
        limit_s=LIMIT_S,
    )
    return rehearse(scenario, root / f"{Path(script).stem}-{backend}", lambda text: None)


def faults_of(shown: Rehearsal, is_strict: bool) -> Iterator[str]:
    """What is wrong with a rehearsal, a sentence each.

    is_strict   the rank must have been replaced, and the output be the same: else that is only reported
    """
    yield from shown.problems
    rungs = {one.rung for one in shown.injections}
    for one in shown.comparisons:
        if not one.is_identical and (one.what == WEIGHTS or rungs == {"replace"}):
            yield f"{one.what} differs: {one.detail}"
    if is_strict and rungs != {"replace"}:
        yield f"the rank was not replaced ({', '.join(sorted(filter(None, rungs))) or 'nothing was done'})"


def check_style(style: str, options: argparse.Namespace, ranks: int, root: Path, backend: str = "gloo") -> bool:
    """Run one style, and print its line; returns whether all is well."""
    shown = break_one(style, options, ranks, root, backend)
    wrong = list(faults_of(shown, options.device == "cpu"))
    (one,) = shown.injections or [None]
    how = "the fault did not strike" if one is None else f"{one.rung or 'nothing'}, {one.outcome or 'not noticed'}"
    took = "" if one is None or one.recover_s is None else f" in {one.recover_s:.2f} s"
    weights = next((found for found in shown.comparisons if found.what == WEIGHTS), None)
    same = "weights identical" if weights is not None and weights.is_identical else "WEIGHTS NOT IDENTICAL"
    print(f"{'ok' if not wrong else 'FAILED':7} {style}, {ranks} ranks, {backend}: {how}{took}; {same}", flush=True)
    incidents = shown.disturbed.status.incidents if shown.disturbed.status else ()
    for incident in incidents:
        if incident.rung != "replace":
            print(f"        why not replaced: {incident.reason}")
    for sentence in wrong:
        print(f"        {sentence}")
    return not wrong


def measure_steps(options: argparse.Namespace, root: Path) -> bool:
    """Print what a step of GPT-2's size takes under torchrun and under ttprun, and whether both come to the same."""
    medians: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    weights: set[str] = set()
    script = REPOSITORY / "scripts" / "bench" / "gpt2.py"
    size = options.size or ("gpt2" if options.device == "cuda" else "small")
    arguments = [
        f"--device={options.device}",
        f"--size={size}",
        f"--steps={options.steps}",
        "--report={folder}/reports",
    ]
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"])
    for repeat in range(options.repeats):
        for launcher in LAUNCHERS:
            with Run(launcher, options.ranks, root / f"step-{repeat}-{launcher}", (), arguments, script) as run:
                run.finish(LIMIT_S)
            reports = [json.loads((run.reports / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
            medians[launcher].append(statistics.mean(report["median_step_s"] for report in reports))
            weights.add(run.weights())
    print(f"\na step of the size {size}, {options.ranks} ranks over gloo, {options.repeats} runs each:")
    ratios = spread(ours / theirs for ours, theirs in zip(medians[TTPRUN], medians[TORCHRUN], strict=True))
    rows = [["median step, ms (least-greatest)", *LAUNCHERS, "ttprun/torchrun"]]
    in_ms = (told(spread(value * 1e3 for value in medians[launcher]), 1) for launcher in LAUNCHERS)
    print_table([*rows, ["", *in_ms, told(ratios, 3)]])
    if len(weights) != 1 or "" in weights:
        print("FAILED  the weights under ttprun are not those under torchrun")
    return len(weights) == 1 and "" not in weights


def main() -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=positive, default=2, help="that share the GPUs over gloo (default 2)")
    parser.add_argument("--only", nargs="+", default=["styles", "nccl", "step"], choices=["styles", "nccl", "step"])
    parser.add_argument("--size", choices=["gpt2", "small"], help="of the step; default: gpt2, on the CPU small")
    parser.add_argument("--steps", type=positive, default=30, help="of a run that is measured (default 30)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each launcher (default 3)")
    parser.add_argument("--folder", type=Path, help="keep the runs there; must not exist")
    options = parser.parse_args()
    try:
        gpus = 0 if options.device == "cpu" else count_gpus()
    except NoGpuError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    print(headline(machine()))
    print(", ".join(name_gpus(gpus)) or "on the CPU", flush=True)
    results: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="ttprun-gpu-") as scratch:
        root = (options.folder or Path(scratch)).absolute()
        if "styles" in options.only:
            results += [check_style(style, options, options.ranks, root) for style in STYLES]
        if "nccl" in options.only and gpus:
            results.append(check_style(NCCL_STYLE, options, gpus, root, "nccl"))
        elif "nccl" in options.only:
            print("left out: NCCL, which needs a GPU for each rank")
        try:
            if "step" in options.only:
                results.append(measure_steps(options, root))
        except BenchmarkError as error:
            print(f"FAILED  a step of GPT-2's size: {error}")
            results.append(False)
    print("all well" if all(results) else f"{results.count(False)} of {len(results)} checks failed")
    return 0 if all(results) else 1


def name_gpus(count: int) -> list[str]:
    """The models of the GPUs."""
    if not count:
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(count)]


if __name__ == "__main__":
    sys.exit(main())
