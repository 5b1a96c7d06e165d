"""What ttprun does with tensors on a device, and what torch and NCCL do there: a report that grows as it is seen.

    scripts/gpu_check.sh                        on a GPU; if there is one only, its ranks share it
    scripts/gpu_check.sh --share-gpu            all ranks on the first GPU, whatever there is
    scripts/gpu_check.sh --minutes 8            nothing lasts longer (default 12)
    scripts/gpu_check.sh --only B C             some of the parts
    scripts/gpu_check.sh --questions            parts A and J alone: what only a card can say (Q1 to Q9)
    scripts/gpu_check.sh --device npu           on the simulated NPU of the tests (or GPU_CHECK_DEVICE=npu)
    scripts/gpu_check.sh --device cpu           on the CPU, to see that this check itself works

{parts}

The parts run in this order, each within its limit, side by side where no times are measured. A rank that comes back in
another way than by being replaced has FAILED, unless the report says what was expected. NCCL takes two ranks on one GPU
for two machines (NCCL_HOSTID) and connects them by sockets: all is as on several GPUs but speed.

Nothing needs a network. Report and JSON are written after each line of theirs. Exit code: 0 all passed, 1 something
failed, 2 there is no GPU. Begin with PARTS.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent / "bench")]

import cost  # noqa: E402
import device_facts  # noqa: E402
import facts  # noqa: E402
import jobs  # noqa: E402
import machine  # noqa: E402
import timing  # noqa: E402
from parts import Part, Place  # noqa: E402
from report import Report, facts_of  # noqa: E402
from runner import OVERTIME_S, Runner  # noqa: E402

SIMULATED = REPOSITORY / "tests" / "simulated_npu"
PARTS = (
    Part("A", "machine, versions, memory", 60, False, machine.look),
    Part("B", "torch and NCCL without ttprun", 240, False, facts.ask_all),
    Part("C", "a rank is killed in each phase", 240, False, jobs.repairs),
    Part("D", "kernels that are not reproducible", 120, False, jobs.noise),
    Part("E", "a rank hangs", 120, False, jobs.hang),
    Part("F", "what a step costs", 150, True, cost.costs),
    Part("G", "seconds from a kill to the next step", 150, True, timing.times),
    Part("H", "texts of errors", 120, False, device_facts.errors),
    Part("I", "a captured all_reduce", 90, False, device_facts.capture),
    Part("J", "streams that wait for a word, and what the host's waits cost", 600, True, facts.ask_gates),
    Part("K", "scripts of four kinds", 240, False, jobs.styles),
)
CORES_A_TASK = 1.5  # two ranks that mostly wait; seen on 16 cores: 9 and 12 at once


class NoGpuError(Exception):
    """There is nothing to check here; the message says what is missing."""


def find_devices(kind: str) -> tuple[str, ...]:
    """Names of the devices that torch can use. Raises NoGpuError if there is none."""
    if kind == "cpu":
        return ()
    if kind == "npu":
        build = [sys.executable, str(SIMULATED / "torch_npu" / "build.py")]
        built = subprocess.run(build, capture_output=True, text=True, check=False)
        if built.returncode:
            raise NoGpuError(f"no simulated NPU: {(built.stderr.strip().splitlines() or ['?'])[-1]}")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SIMULATED), os.environ.get("PYTHONPATH"))))
        return ("simulated NPU (no hardware)",)
    import torch

    if torch.cuda.is_available():
        return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    why = "finds none (see nvidia-smi)" if torch.version.cuda else f"{torch.__version__} was built without CUDA"
    raise NoGpuError(f"no GPU: torch {why}; run this where there is one, or with --device npu or cpu")


def parsed() -> argparse.Namespace:
    """The options."""
    listed = "\n".join(f"  {part.letter}  {part.title}, {part.limit_s:.0f} s at most" for part in PARTS)
    text = (__doc__ or "").replace("{parts}", listed)
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = os.environ.get("GPU_CHECK_DEVICE") or "cuda"
    parser.add_argument("--device", default=kind, choices=["cuda", "npu", "cpu"])
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on the first GPU; implied if there is one")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.letter for part in PARTS])
    parser.add_argument("--questions", action="store_const", dest="only", const=["A", "J"], help="--only A J")
    parser.add_argument("--minutes", type=float, default=12.0, help="in all (default 12)")
    parser.add_argument("--report", type=Path, default=Path("gpu_check.md"), help="its JSON lies beside it")
    parser.add_argument("--beside", type=int, help=f"tasks at once (default: one for {CORES_A_TASK} cores)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits but --minutes, if slow")
    parser.add_argument("--folder", type=Path, help="keep the runs there; must not exist")
    return parser.parse_args()


def main() -> int:
    """Check, print, and return the exit code."""
    options = parsed()
    ends_s = time.monotonic() + options.minutes * 60 - OVERTIME_S
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    try:
        names = find_devices(options.device)
    except NoGpuError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the report is written
    options.report.parent.mkdir(parents=True, exist_ok=True)
    shares = options.device == "cuda" and (options.share_gpu or len(names) == 1)
    beside = options.beside or max(1, int(len(os.sched_getaffinity(0)) / CORES_A_TASK))
    with tempfile.TemporaryDirectory(prefix="ttprun-gpu-", ignore_cleanup_errors=True) as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        place = Place(options.device, names, shares, 2, folder, options.patience)
        report = Report(options.report, facts_of(names) | {"tasks at once": str(beside)})
        Runner(report, place, ends_s, beside).run(
            [part for part in PARTS if part.letter in (options.only or part.letter)]
        )
        return report.finish()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a task that has not come back is not waited for
