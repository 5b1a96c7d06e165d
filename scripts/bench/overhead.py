"""What ttprun costs while nothing fails: step time and peak memory of the same script under ttprun and under torchrun.

    python scripts/bench/overhead.py --repeats 5 --json overhead.json

Two sizes of model, with steps of about 50 ms and of about 5 ms; two ranks of one thread. A third one, of 38 MB of
gradients and small batches, shows whether the cost grows with the gradients (--sizes 50ms 38MB). The launchers take
turns (torchrun, ttprun, torchrun, ...), and each run under ttprun is compared with the one under torchrun before it.
The script measures its own steps, after a warm-up that is longer than the start of ttprun's standby. What the same run
under torchrun takes from one turn to the next is printed too: a ratio within that range says nothing. Neighbours on the
machine disturb the processor time of a step less than its wall time. Begin with measure().

    python scripts/bench/overhead.py --framework transformers accelerate lightning

A framework's loop with steps of about 50 ms: both launchers in one run, in turns of --block steps; see turns.py.

    python scripts/bench/overhead.py --layout fsdp fsdp+unmirrored hsdp tp pp

The same with sharded parameters or a pipeline, and what a rank's memory peaks at (hsdp with --ranks 4); see layouts.py
and pipelined.py.

    python scripts/bench/overhead.py --held samples rows table

The same with a small model and a dataset of more than a million samples in memory; see held_data.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from runs import (
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
from turns import FRAMEWORKS, HELD, HELD_SCRIPT, LAYOUTS, measure_pairs

MIB = 1 << 20
ALLOWED_BYTES = 64 * MIB  # beside the gradients' size
LIMIT_S = 600.0


@dataclass(frozen=True)
class Size:
    """A size of train.py.

    label      the step's time that it is meant to have, or the gradients' size
    arguments  of train.py
    step_s     seconds of a step, roughly, by which the warm-up is counted
    """

    label: str
    arguments: tuple[str, ...]
    step_s: float


SIZES = (
    Size("50 ms", ("--width=1024", "--depth=3", "--batch-size=64"), 0.050),
    Size("5 ms", ("--width=256", "--depth=3", "--batch-size=64"), 0.005),
    Size("38 MB", ("--width=1024", "--depth=9", "--batch-size=16"), 0.060),
)
DEFAULT_SIZES = ["50ms", "5ms"]


@dataclass
class Measurement:
    """One run.

    reports   what each rank has written of itself: see write_report() of train.py
    launcher_bytes, others_bytes   peak memory of the launcher, and of all processes that are no ranks (standbys)
    """

    launcher: str
    size: str
    repeat: int
    load: float
    reports: list[dict[str, Any]] = field(default_factory=list)
    launcher_bytes: int = 0
    others_bytes: int = 0

    def over_ranks(self, name: str) -> float:
        """The mean over ranks of one figure of their reports."""
        return mean(float(report[name]) for report in self.reports)

    @property
    def step_s(self) -> float:
        """A step's median time; the ranks meet in each step, so theirs hardly differ."""
        return self.over_ranks("median_step_s")

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that took most, shared memory that it has touched included."""
        return max(int(report["peak_bytes"]) for report in self.reports)


def measure(launcher: str, size: Size, options: argparse.Namespace, repeat: int, folder: Path) -> Measurement:
    """One run. Raises BenchmarkError if it fails."""
    found = Measurement(launcher, size.label, repeat, round(os.getloadavg()[0], 2))
    warm_up, steps = (max(3, round(seconds / size.step_s)) for seconds in (options.warm_up, options.measured))
    arguments = [*size.arguments, f"--steps={warm_up + steps}", f"--warm-up={warm_up}", "--report={folder}/reports"]
    with Run(launcher, options.ranks, folder, arguments=arguments) as run:
        peaks = watch_memory(run)
        run.finish(LIMIT_S)
    found.reports = [json.loads((run.reports / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
    found.launcher_bytes = peaks.pop(run.process.pid, 0)
    ranks = {report["pid"] for report in found.reports}
    found.others_bytes = sum(peak for pid, peak in peaks.items() if pid not in ranks)
    return found


def watch_memory(run: Run) -> dict[int, int]:
    """Peak memory in bytes of the launcher and its descendants, by pid.

    Looks each second, until the launcher ends or LIMIT_S have passed.
    """
    peaks: dict[int, int] = {}
    give_up_at_s = time.monotonic() + LIMIT_S
    while run.process.poll() is None and time.monotonic() < give_up_at_s:
        try:
            launcher = psutil.Process(run.process.pid)
            family = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for process in family:
            peaks[process.pid] = max(peaks.get(process.pid, 0), peak_of(process.pid))
        time.sleep(1.0)
    return peaks


def peak_of(pid: int) -> int:
    """A process' peak resident memory in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def summarize(size: Size, measurements: list[Measurement]) -> dict[str, Any]:
    """Spreads by launcher; ratios and differences of memory pair by pair; torchrun's own ratios from turn to turn."""
    ours, theirs = (
        [one for one in measurements if one.size == size.label and one.launcher == launcher]
        for launcher in (TTPRUN, TORCHRUN)
    )
    pairs = list(zip(ours, theirs, strict=True))
    gradient_bytes = ours[0].reports[0]["gradient_bytes"]
    extra = spread(one.peak_bytes - base.peak_bytes for one, base in pairs)
    assert extra is not None
    return {
        "size": size.label,
        "parameters": ours[0].reports[0]["parameters"],
        "gradient_bytes": gradient_bytes,
        "steps": ours[0].reports[0]["steps"],
        "ratio": spread(one.step_s / base.step_s for one, base in pairs),
        "cpu_ratio": spread(one.over_ranks("cpu_step_s") / base.over_ranks("cpu_step_s") for one, base in pairs),
        "extra_cpu_s": spread(one.over_ranks("cpu_step_s") - base.over_ranks("cpu_step_s") for one, base in pairs),
        "torchrun_ratio": spread(after.step_s / before.step_s for before, after in pairwise(theirs)),
        "extra_bytes": extra,
        "allowed_extra_bytes": gradient_bytes + ALLOWED_BYTES,
        "is_memory_allowed": extra["max"] <= gradient_bytes + ALLOWED_BYTES,
        **{
            launcher: {
                "step_s": spread(one.step_s for one in found),
                "cpu_step_s": spread(one.over_ranks("cpu_step_s") for one in found),
                "p90_step_s": spread(one.over_ranks("p90_step_s") for one in found),
                "peak_bytes": spread(one.peak_bytes for one in found),
                "memory_file_bytes": spread(one.over_ranks("memory_file_bytes") for one in found),
                "launcher_bytes": spread(one.launcher_bytes for one in found),
                "others_bytes": spread(one.others_bytes for one in found),
            }
            for launcher, found in ((TORCHRUN, theirs), (TTPRUN, ours))
        },
    }


def show(summary: dict[str, Any]) -> None:
    """A summary as a table."""
    both = [summary[launcher] for launcher in LAUNCHERS]
    rows = [[f"{summary['size']}: median (min-max)", *LAUNCHERS, "ttprun/torchrun, pair by pair"]]
    rows.append(["median step, ms", *(scaled(one["step_s"], 1e3, 3) for one in both), formatted(summary["ratio"], 4)])
    rows.append(["  torchrun from turn to turn", "", "", formatted(summary["torchrun_ratio"], 4)])
    rows.append(["90th percentile of steps, ms", *(scaled(one["p90_step_s"], 1e3, 3) for one in both), ""])
    cpu = (scaled(one["cpu_step_s"], 1e3, 3) for one in both)
    rows.append(["processor time of a step, ms", *cpu, formatted(summary["cpu_ratio"], 4)])
    rows.append(["  more under ttprun, ms", "", "", scaled(summary["extra_cpu_s"], 1e3, 3)])
    for label, name in (
        ("peak memory of a rank, MiB", "peak_bytes"),
        ("  shared memory files in it, MiB", "memory_file_bytes"),
        ("peak memory of the launcher, MiB", "launcher_bytes"),
        ("peak memory of its standbys, MiB", "others_bytes"),
    ):
        rows.append([label, *(scaled(one[name], 1 / MIB, 1) for one in both), ""])
    print()
    print(
        f"{summary['parameters']:,} parameters, {summary['gradient_bytes'] / MIB:.1f} MiB of gradients, "
        f"{summary['steps']} steps a run"
    )
    print_table(rows)
    print(
        f"ttprun takes {scaled(summary['extra_bytes'], 1 / MIB, 1)} MiB more a rank; gradients + "
        f"{ALLOWED_BYTES // MIB} MiB = {summary['allowed_extra_bytes'] / MIB:.1f} MiB: "
        + ("within" if summary["is_memory_allowed"] else "MORE THAN THAT")
    )


def scaled(found: dict[str, float] | None, factor: float, digits: int) -> str:
    """A spread in another unit, as text."""
    return formatted(found and {name: value * factor for name, value in found.items()}, digits)


def measure_all(options: argparse.Namespace, sizes: list[Size], root: Path) -> list[Measurement]:
    """All runs, one after the other, with a line on each. Raises BenchmarkError."""
    turns = [(size, repeat, launcher) for size in sizes for repeat in range(options.repeats) for launcher in LAUNCHERS]
    measurements: list[Measurement] = []
    for number, (size, repeat, launcher) in enumerate(turns, 1):
        folder = root / f"{size.label.replace(' ', '')}-{repeat}-{launcher}"
        try:
            found = measure(launcher, size, options, repeat, folder)
        except BenchmarkError as error:
            raise BenchmarkError(f"{launcher}, {size.label}: {error}") from None
        measurements.append(found)
        print(
            f"[{number}/{len(turns)}] {launcher:8} {size.label:>5}: median step {found.step_s * 1e3:.3f} ms, "
            f"processor {found.over_ranks('cpu_step_s') * 1e3:.3f} ms, "
            f"peak {found.peak_bytes / MIB:.1f} MiB a rank, load {found.load:.1f}",
            flush=True,
        )
    return measurements


def measure_loop(name: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Pairs of blocks with the loop of a framework, or with a large dataset; prints ratios. Raises BenchmarkError."""
    script, arguments = (FRAMEWORKS[name], ()) if name in FRAMEWORKS else (HELD_SCRIPT, (f"--held={name}",))
    layout, is_unmirrored, _ = name.partition("+")
    if layout in LAYOUTS:
        script, arguments = LAYOUTS[layout]
    found: dict[str, Any] = {"loop": name}
    of_ttprun = ("--buddy", "off") if is_unmirrored else ()
    pairs = list(measure_pairs(script, options.ranks, options.blocks, options.block, root / name, arguments, of_ttprun))
    rows = [[f"{name}, {len(pairs)} pairs of {options.block} steps: median (quartiles)", *LAUNCHERS, "ratio", "more"]]
    for label, figure in (("median step, ms", "step_s"), ("processor time of a step, ms", "cpu_step_s")):
        theirs, ours = ([getattr(pair[launcher], figure) for pair in pairs] for launcher in LAUNCHERS)
        ratio = quartiles([one / base for one, base in zip(ours, theirs, strict=True)])
        more = quartiles([one - base for one, base in zip(ours, theirs, strict=True)])
        found[figure] = {TORCHRUN: theirs, TTPRUN: ours, "ratio": ratio, "more": more}
        cells = [scaled(quartiles(each), 1e3, 2) for each in (theirs, ours)]
        rows.append([label, *cells, formatted(ratio, 3), scaled(more, 1e3, 2)])
    for label, figure in (
        ("peak memory of a rank, MiB", "peak_bytes"),
        ("  shared memory files in it, MiB", "memory_file_bytes"),
    ):
        before, under = (max(getattr(pair[launcher], figure) for pair in pairs) for launcher in LAUNCHERS)
        found[figure] = {TORCHRUN: before, TTPRUN: under}
        rows.append([label, f"{before / MIB:.1f}", f"{under / MIB:.1f}", "", f"{(under - before) / MIB:.1f}"])
    print()
    print_table(rows)
    return found


def quartiles(values: list[float]) -> dict[str, float]:
    """The median; and quartiles in the places of the extremes, since some of many blocks are disturbed."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "min": low, "max": high}


def main() -> int:
    """Measure and print; returns the exit code: 1 if a run has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=5, help="runs of each launcher at each size (default 5)")
    parser.add_argument("--ranks", type=positive, default=2, help="default 2")
    parser.add_argument(
        "--sizes", nargs="+", default=DEFAULT_SIZES, choices=[*DEFAULT_SIZES, "38MB"], help="default: the first two"
    )
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds of steps before measuring (default 8)")
    parser.add_argument("--measured", type=float, default=10.0, help="seconds of steps to measure (default 10)")
    parser.add_argument("--framework", nargs="+", default=[], choices=list(FRAMEWORKS), help="loops of these instead")
    parser.add_argument("--held", nargs="+", default=[], choices=HELD, help="datasets of this kind instead")
    parser.add_argument(
        "--layout",
        nargs="+",
        default=[],
        choices=[*LAYOUTS, *(f"{one}+unmirrored" for one in LAYOUTS)],
        help="sharded models",
    )
    parser.add_argument("--blocks", type=positive, default=30, help="pairs of blocks with these (default 30)")
    parser.add_argument("--block", type=positive, default=40, help="steps of a block (default 40)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the runs' logs there; must not exist")
    options = parser.parse_args()
    before = machine()
    print(headline(before), flush=True)
    sizes = [size for size in SIZES if size.label.replace(" ", "") in options.sizes]
    measurements: list[Measurement] = []
    try:
        with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
            root = options.folder or Path(scratch)
            if loops := options.framework + options.held + options.layout:
                summaries = [measure_loop(name, options, root) for name in loops]
            else:
                measurements = measure_all(options, sizes, root)
                summaries = [summarize(size, measurements) for size in sizes]
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    for summary in summaries if measurements else ():
        show(summary)
    print(f"\nat the end: {headline(machine())}")
    if options.json:
        figures = {"machine": before, "load_at_end": machine()["load"], "summaries": summaries}
        options.json.write_text(json.dumps(figures | {"runs": [asdict(one) for one in measurements]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
