"""What ttprun does with tensors on a device: broken ranks of four styles of scripts, times, and real errors.

    scripts/gpu_check.sh                      all of it, on the GPU; begins nothing after 25 minutes
    scripts/gpu_check.sh --quick              one style, fewer runs; nothing after 6 minutes
    scripts/gpu_check.sh --device npu         the same on the simulated NPU of the tests (or GPU_CHECK_DEVICE=npu)
    scripts/gpu_check.sh --device cpu         the same on the CPU, to see that this check itself works

  styles         each style runs undisturbed under torchrun, and under ttprun with one rank killed in mid-step. All
                 are deterministic, so their weights must be the same bit for bit. A rank that is restarted with all
                 others is reported with the reason, and fails on the CPU and the NPU only
  faults         other faults: a rank that hangs, failed memory of the simulated device
  nccl           the first style over NCCL with one rank a GPU, where the ranks above share one over gloo
  communicators  seconds of a new communicator, and of an abort
  errors         errors are caused on the device: their texts, and what ttprun's table makes of them
  step           a step of GPT-2's size under torchrun and under ttprun, and what a standby holds meanwhile

Nothing needs a network. A part that fails does not end the check; what is not begun when the time is up has failed. The
report in Markdown is for an issue. Exit code: 0 all passed, 1 something failed, 2 there is no GPU. Begin with main().
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent / "bench")]

import error_texts  # noqa: E402
import step_cost  # noqa: E402
from report import Report  # noqa: E402
from runs import LAUNCHERS, TORCHRUN, TTPRUN, Run, formatted, headline, machine, positive, spread  # noqa: E402
from styles import ENVIRONMENT, STYLES, Device, Trial, try_one  # noqa: E402

SIMULATED = REPOSITORY / "tests" / "simulated_npu"
PARTS = ("styles", "faults", "nccl", "communicators", "errors", "step")
RUN_LIMIT_S = 600.0


class NoGpuError(Exception):
    """There is nothing to check here; the message says what is missing."""


class Check:
    """All parts, one after the other.

    root    keeps the runs
    ends_s  monotonic: nothing is begun from then on
    """

    def __init__(self, options: argparse.Namespace, device: Device, root: Path, ends_s: float) -> None:
        self.options, self.device, self.root, self.ends_s = options, device, root, ends_s
        self.backend = device.backend(options.ranks)
        self.report = Report()

    def run(self) -> None:
        """Do all that was asked for, as far as time allows; what fails is in the report."""
        for part in self.options.only:
            for name, do in getattr(self, part)():
                if self.left_s() <= 0:
                    self.report.judge(name, False, "not begun, as the time is up")
                    continue
                try:
                    do()
                except Exception as error:  # the rest is still worth having
                    self.report.judge(name, False, f"{type(error).__name__}: {error}")

    def left_s(self) -> float:
        """Seconds that may still be spent, and on one run at most its own limit."""
        return min(self.ends_s - time.monotonic(), RUN_LIMIT_S)

    def styles(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each style, one rank killed."""
        for style in list(STYLES)[: 1 if self.options.quick else None]:
            yield self.trial(style, "kill")

    def faults(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What else can happen to a rank."""
        for fault in ("hang", "memory") if self.device.kind == "npu" else ("hang",):
            for style in list(STYLES)[: 1 if self.options.quick or self.device.kind != "cuda" else None]:
                yield self.trial(style, fault)

    def nccl(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """A rank a GPU, where the ranks above share them."""
        if self.device.kind != "cuda":
            self.report.leave_out("NCCL", "it needs a GPU")
        elif self.backend != "nccl":
            yield self.trial(next(iter(STYLES)), "kill", len(self.device.names), "nccl")

    def trial(self, style: str, fault: str, ranks: int = 0, backend: str = "") -> tuple[str, Callable[[], None]]:
        """One trial, by its name."""
        trial = Trial(style, ranks or self.options.ranks, backend or self.backend, fault)
        return str(trial), lambda: self.report.add(try_one(trial, self.device, self.root, self.left_s()))

    def communicators(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What a recovery makes anew."""
        kinds = {(self.backend, self.options.ranks)}
        if self.device.kind == "cuda":
            kinds |= {("nccl", min(self.options.ranks, len(self.device.names))), ("gloo", self.options.ranks)}
        for backend, ranks in sorted(kinds):
            yield f"communicators, {backend}", partial(self.time_communicators, ranks, backend)

    def time_communicators(self, ranks: int, backend: str) -> None:
        arguments = [f"--device={self.device.kind}", f"--backend={backend}"]
        folder, script = self.root / f"communicators-{backend}", HERE / "communicators.py"
        with Run(TORCHRUN, ranks, folder, (), arguments, script) as run:
            run.finish(self.left_s())
        took = json.loads(next(line for line in run.output().splitlines() if line.startswith("{")))
        for what, seconds in took.items():
            in_ms = formatted(spread(value * 1e3 for value in seconds), 1)
            self.report.measured.append([f"{what} communicator, {ranks} ranks, {backend}, ms", in_ms])
        median_s = statistics.median(took["new"])
        self.report.judge(f"communicators, {ranks} ranks, {backend}", True, f"a new one in {median_s * 1e3:.1f} ms")

    def errors(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each error that these devices can show."""
        gpus = len(self.device.names) if self.device.kind == "cuda" else 0
        for one in error_texts.CAUSES.values():
            if one.devices <= gpus:
                yield one.cause, partial(self.try_error, one.cause)
            elif gpus:
                self.report.leave_out(one.cause, f"it needs {one.devices} GPUs")

    def try_error(self, cause: str) -> None:
        self.report.add_text(error_texts.provoke(cause))

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The cost with nothing failing."""
        yield "a step of GPT-2's size", self.measure_step

    def measure_step(self) -> None:
        size = self.options.size or ("gpt2" if self.device.kind == "cuda" else "small")
        repeats = 1 if self.options.quick else self.options.repeats
        given = {"device": self.device.kind, "size": size, "steps": self.options.steps, "backend": self.backend}
        arguments = [f"--{name}={value}" for name, value in given.items()]
        cost = step_cost.measure(self.options.ranks, repeats, arguments, self.root, self.left_s)
        what = f"a step of the size {size}, {self.options.ranks} ranks, {self.backend}"
        for launcher in LAUNCHERS:
            in_ms = formatted(spread(value * 1e3 for value in cost.medians[launcher]), 1)
            self.report.measured.append([f"{what}, {launcher}, ms", in_ms])
        self.report.measured.append([f"{what}, {TTPRUN}/{TORCHRUN}", formatted(cost.ratio, 3)])
        memory = f"{cost.standby.memory / step_cost.MIB:.0f}"
        self.report.measured.append(["a standby: memory on the host, MiB", memory])
        self.report.measured.append(["a standby: on a GPU", "a context" if cost.standby.holds else "none"])
        same = "weights identical" if cost.is_identical else "WEIGHTS NOT IDENTICAL to torchrun's"
        self.report.judge(what, cost.is_identical, same)


def find_devices(kind: str) -> Device:
    """The devices that torch can use. Raises NoGpuError if there is none."""
    if kind == "cpu":
        return Device(kind, ())
    if kind == "npu":
        build = [sys.executable, str(SIMULATED / "torch_npu" / "build.py")]
        built = subprocess.run(build, capture_output=True, text=True, check=False)
        if built.returncode:
            raise NoGpuError(f"no simulated NPU: {(built.stderr.strip().splitlines() or ['?'])[-1]}")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SIMULATED), os.environ.get("PYTHONPATH"))))
        ENVIRONMENT["PYTHONPATH"] = os.pathsep.join((str(SIMULATED), ENVIRONMENT["PYTHONPATH"]))
        return Device(kind, ("simulated NPU (no hardware)",))
    import torch

    if torch.cuda.is_available():
        return Device(kind, tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())))
    why = "finds none (see nvidia-smi)" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
    raise NoGpuError(f"no GPU: torch {why}; run this where there is one, or with --device npu or cpu")


def main() -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = os.environ.get("GPU_CHECK_DEVICE") or "cuda"
    parser.add_argument("--device", default=kind, choices=["cuda", "npu", "cpu"])
    parser.add_argument("--quick", action="store_true", help="one style, fewer runs; begins nothing after 6 minutes")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--minutes", type=float, help="nothing is begun after these (default 25, with --quick 6)")
    parser.add_argument("--ranks", type=positive, default=2, help="over gloo if there are fewer GPUs (default 2)")
    parser.add_argument("--report", type=Path, default=Path("gpu_check.md"), help="default: gpu_check.md")
    parser.add_argument("--size", choices=["gpt2", "small"], help="of the step; default: gpt2, on the CPU small")
    parser.add_argument("--steps", type=positive, default=30, help="of a run that is measured (default 30)")
    parser.add_argument("--repeats", type=positive, default=3, help="measured runs of each launcher (default 3)")
    parser.add_argument("--folder", type=Path, help="keep the runs there; must not exist")
    options = parser.parse_args()
    minutes = options.minutes or (6 if options.quick else 25)
    ends_s = time.monotonic() + minutes * 60
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"])
    try:
        device = find_devices(options.device)
    except NoGpuError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ttprun-gpu-") as scratch:
        check = Check(options, device, (options.folder or Path(scratch)).absolute(), ends_s)
        check.report.say(headline(machine()))
        check.report.say(", ".join(device.names) or "on the CPU")
        check.run()
    return check.report.finish(options.report, device)


if __name__ == "__main__":
    sys.exit(main())
