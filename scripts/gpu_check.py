"""What ttprun does with tensors on a device: break and recover four styles of scripts, and the cost of a step.

    scripts/gpu_check.sh                      all of it, on the GPU; several ranks share one if there are fewer
    scripts/gpu_check.sh --device npu         the same on the simulated NPU of the tests (or GPU_CHECK_DEVICE=npu)
    scripts/gpu_check.sh --device cpu         the same on the CPU, to see that this check itself works

Each style runs undisturbed under torchrun, and under ttprun with one rank killed in mid-step; the first one also with
a rank that hangs, and with failed memory of the simulated device. All are deterministic, so their weights must be the
same bit for bit. A rank that is not repaired, but restarted with all others, is reported with its reason, and fails on
the CPU and the NPU only. Where each rank has a GPU of its own, all is over NCCL; else over gloo, and NCCL with one
rank a GPU once. The step is one of GPT-2's size. A report in Markdown is written to
attach to an issue. Exit code: 0 all passed, 1 something failed, 2 there is no GPU. Begin with main().
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
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
    formatted,
    headline,
    machine,
    positive,
    print_table,
    spread,
)

from ttprun import __version__  # noqa: E402
from ttprun.chaos.drill.rehearsal import DrillReport, rehearse  # noqa: E402
from ttprun.chaos.drill.scenario import Scenario  # noqa: E402

# Before a script has saved anything with which it would begin.
KILL = "kill:rank={rank},step=5,phase=backward"
HANG = "stop:rank={rank},step=5,phase=backward"
MEMORY = "uce-high:rank={rank},step=5,phase=forward"
HANG_TIMEOUT_S = 20
SIMULATED = REPOSITORY / "tests" / "simulated_npu"
REPAIRED = {"replace", "rerun"}
# Deterministic matrix products of cuBLAS need room of a fixed size.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
STYLES = {
    "one loop in the module": ("while_true_get_batch.py", ("--max_iters=24",)),
    "epochs over a DataLoader": ("epochs_dataloader.py", ("--epochs=2",)),
    "a Trainer class": ("trainer_class.py", ("--epochs=2",)),
    "two optimizers, iter() and next()": ("iter_next_two_optimizers.py", ("--iterations=24",)),
}
FIRST_STYLE = "one loop in the module"
WEIGHTS = "out/final.pt"
LIMIT_S = 600.0


class NoGpuError(Exception):
    """There is nothing to check here; the message says what is missing."""


def count_devices(device: str) -> int:
    """Devices that torch can use. Raises NoGpuError if there is none."""
    if device == "npu":
        build = [sys.executable, str(SIMULATED / "torch_npu" / "build.py")]
        built = subprocess.run(build, capture_output=True, text=True, check=False)
        if built.returncode:
            raise NoGpuError(f"no simulated NPU: {(built.stderr.strip().splitlines() or ['?'])[-1]}")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SIMULATED), os.environ.get("PYTHONPATH"))))
        ENVIRONMENT["PYTHONPATH"] = os.pathsep.join((str(SIMULATED), ENVIRONMENT["PYTHONPATH"]))
        return 2
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    why = "finds none (see nvidia-smi)" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
    raise NoGpuError(f"no GPU: torch {why}; run this where there is one, or with --device npu or cpu")


def break_one(
    style: str, options: argparse.Namespace, ranks: int, root: Path, backend: str, fault: str = KILL
) -> DrillReport:
    """Run a style twice, undisturbed and with its last rank broken."""
    script, arguments = STYLES[style]
    backends = [f"--backend={backend}"] if backend != "gloo" else []
    scenario = Scenario(
        script=str(REPOSITORY / "tests" / "scripts" / script),
        arguments=["--out={folder}/out", *arguments, f"--device={options.device}", *backends],
        environment=ENVIRONMENT,
        launch={"nproc_per_node": ranks, "max_restarts": 1},
        ttprun={"hang_timeout_s": HANG_TIMEOUT_S} if fault == HANG else {},
        faults=[fault.format(rank=ranks - 1)],
        compare=[WEIGHTS],
        limit_s=LIMIT_S,
    )
    return rehearse(scenario, root / f"{Path(script).stem}-{backend}-{fault.partition(':')[0]}", lambda text: None)


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


def check_style(
    style: str, options: argparse.Namespace, ranks: int, root: Path, backend: str = "gloo", fault: str = KILL
) -> bool:
    """Run one style, and say what came of it; returns whether all is well."""
    shown = break_one(style, options, ranks, root, backend, fault)
    wrong = list(faults_of(shown, options.device != "cuda"))
    (one,) = shown.injections or [None]
    how = "the fault did not strike" if one is None else f"{one.rung or 'nothing'}, {one.outcome or 'not noticed'}"
    took = "" if one is None or one.recover_s is None else f" in {one.recover_s:.2f} s"
    weights = next((found for found in shown.comparisons if found.what == WEIGHTS), None)
    same = "weights identical" if weights is not None and weights.is_identical else "WEIGHTS NOT IDENTICAL"
    kind = fault.partition(":")[0]
    say(f"{'ok' if not wrong else 'FAILED':7} {style}, {ranks} ranks, {backend}, {kind}: {how}{took}; {same}")
    incidents = shown.disturbed.status.incidents if shown.disturbed.status else ()
    for incident in incidents:
        if incident.rung not in REPAIRED:
            say(f"        why not repaired: {incident.reason}")
    for sentence in wrong:
        say(f"        {sentence}")
    return not wrong


def backend_of(options: argparse.Namespace, gpus: int) -> str:
    """What the ranks communicate by: NCCL if each has a GPU of its own."""
    if options.device == "npu":
        return "hccl"
    return "nccl" if gpus >= options.ranks else "gloo"


def measure_steps(options: argparse.Namespace, root: Path, backend: str) -> bool:
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
        f"--backend={backend}",
    ]
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"])
    for repeat in range(options.repeats):
        for launcher in LAUNCHERS:
            with Run(launcher, options.ranks, root / f"step-{repeat}-{launcher}", (), arguments, script) as run:
                run.finish(LIMIT_S)
            reports = [json.loads((run.reports / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
            medians[launcher].append(statistics.mean(report["median_step_s"] for report in reports))
            weights.add(run.weights())
    say(f"\na step of the size {size}, {options.ranks} ranks over {backend}, {options.repeats} runs each:")
    ratios = spread(ours / theirs for ours, theirs in zip(medians[TTPRUN], medians[TORCHRUN], strict=True))
    rows = [["median step, ms (least-greatest)", *LAUNCHERS, "ttprun/torchrun"]]
    in_ms = (formatted(spread(value * 1e3 for value in medians[launcher]), 1) for launcher in LAUNCHERS)
    rows.append(["", *in_ms, formatted(ratios, 3)])
    print_table(rows)
    _said.extend(f"    {'; '.join(row)}" for row in rows)
    if len(weights) != 1 or "" in weights:
        say("FAILED  the weights under ttprun are not those under torchrun")
    return len(weights) == 1 and "" not in weights


_said: list[str] = []


def say(line: str) -> None:
    """Print a line, which the report holds too."""
    print(line, flush=True)
    _said.append(f"    {line}")


def write_report(path: Path, devices: list[str]) -> None:
    """What was said, as Markdown, with the versions of all that had a part in it."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    facts = {
        "device": ", ".join(devices) or "CPU",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
        "Python": sys.version.split()[0],
        "ttprun": __version__,
    }
    lines = ["# ttprun on a device", "", *(f"* {name}: {value}" for name, value in facts.items()), "", *_said, ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    print(f"the report: {path}")


def main() -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = os.environ.get("GPU_CHECK_DEVICE") or "cuda"
    parser.add_argument("--device", default=device, choices=["cuda", "npu", "cpu"])
    parser.add_argument("--ranks", type=positive, default=2, help="that share the GPUs over gloo (default 2)")
    parts = ["styles", "faults", "nccl", "step"]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--report", type=Path, default=Path("gpu_check.md"), help="default: gpu_check.md")
    parser.add_argument("--size", choices=["gpt2", "small"], help="of the step; default: gpt2, on the CPU small")
    parser.add_argument("--steps", type=positive, default=30, help="of a run that is measured (default 30)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each launcher (default 3)")
    parser.add_argument("--folder", type=Path, help="keep the runs there; must not exist")
    options = parser.parse_args()
    try:
        count = 0 if options.device == "cpu" else count_devices(options.device)
    except NoGpuError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    devices = name_devices(options.device, count)
    gpus = count if options.device == "cuda" else 0
    backend = backend_of(options, gpus)
    say(headline(machine()))
    say(", ".join(devices) or "on the CPU")
    results: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="ttprun-gpu-") as scratch:
        root = (options.folder or Path(scratch)).absolute()
        if "styles" in options.only:
            results += [check_style(style, options, options.ranks, root, backend) for style in STYLES]
        if "faults" in options.only:
            for fault in (HANG, MEMORY) if options.device == "npu" else (HANG,):
                results.append(check_style(FIRST_STYLE, options, options.ranks, root, backend, fault))
        if "nccl" in options.only and backend == "nccl":
            pass  # all of the above
        elif "nccl" in options.only and gpus:
            results.append(check_style(FIRST_STYLE, options, gpus, root, "nccl"))
        elif "nccl" in options.only:
            say("left out: NCCL, which needs a GPU for each rank")
        try:
            if "step" in options.only:
                results.append(measure_steps(options, root, backend))
        except BenchmarkError as error:
            say(f"FAILED  a step of GPT-2's size: {error}")
            results.append(False)
    say("all well" if all(results) else f"{results.count(False)} of {len(results)} checks failed")
    write_report(options.report, devices)
    return 0 if all(results) else 1


def name_devices(device: str, count: int) -> list[str]:
    """The models of the devices."""
    if not count:
        return []
    if device == "npu":
        return ["simulated NPU (no hardware)"]
    import torch

    return [torch.cuda.get_device_name(index) for index in range(count)]


if __name__ == "__main__":
    sys.exit(main())
