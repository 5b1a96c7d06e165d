"""What ttprun costs while nothing fails: the same script under ttprun and under torchrun, in turns of some steps each.

    python scripts/bench/overhead.py --quick small            one script, a minute: compare before and after a change
    python scripts/bench/overhead.py                          what people write, frameworks, sharded models
    python scripts/bench/overhead.py tokens objects names     datasets that keep much in memory
    python scripts/bench/overhead.py everything --json overhead.json

Two ranks of one thread, both jobs in one run; see turns.py, which lists the scripts. What counts is `main thread`: the
processor time that the main thread of a rank has taken for a step (`time.thread_time`), which neighbours on the machine
disturb little. Its mean holds what is done in few steps; the median does not. Beside it are the wall time, the
processor time of all threads, and memory. Each pair of blocks gives a ratio and a difference; their medians and
quartiles are printed. `torchrun, block by block` is what the same job takes from one block to the next: a difference
below its distance from 1 says nothing. Begin with measure().
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs import LAUNCHERS, TORCHRUN, TTPRUN, BenchmarkError, formatted, headline, machine, positive, print_table
from turns import FIGURES, LOOPS, OF_SIMULATED_NPU, Others, build_simulated_npu, measure_pairs

MIB = 1 << 20
DEFAULT = ("small", "large", "large+lists", "transformers", "lightning", "accelerate", "fsdp", "fsdp+unmirrored")
EVERYTHING = "everything"
TIMES = (
    ("main thread, ms a step", "main_step_s"),
    ("  the median step", "median_main_step_s"),
    ("all threads, ms a step", "cpu_step_s"),
    ("wall, ms, the median step", "step_s"),
    ("wall, ms a step", "mean_step_s"),
)
MEMORY = (("peak memory of a rank, MiB", "peak_bytes"), ("  shared memory files in it", "memory_file_bytes"))


def measure(name: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measure one of LOOPS. Raises BenchmarkError.

    returns  figure -> by launcher, the values of all blocks; "ratio", "more", "torchrun_ratio": quartiles over pairs
    """
    loop, others = LOOPS[name], Others()
    if loop.extra is OF_SIMULATED_NPU:
        build_simulated_npu()
    blocks = options.blocks or (24 if options.quick else 30)
    if options.block:
        loop = dataclasses.replace(loop, block=options.block)
    began_s = time.monotonic()
    pairs = []
    for pair in measure_pairs(loop, options.ranks, blocks, root / name, others, with_standby=not options.quick):
        pairs.append(pair)
        if len(pairs) >= 3 and time.monotonic() - began_s > options.limit_s:
            break
    summary: dict[str, Any] = {"loop": name, "what": loop.what, "pairs": len(pairs), "block": loop.block}
    for figure in FIGURES:
        theirs, ours = ([getattr(pair[launcher], figure) for pair in pairs] for launcher in LAUNCHERS)
        summary[figure] = {
            TORCHRUN: theirs,
            TTPRUN: ours,
            "ratio": quartiles([measured / base for measured, base in zip(ours, theirs, strict=True) if base]),
            "more": quartiles([measured - base for measured, base in zip(ours, theirs, strict=True)]),
            "torchrun_ratio": quartiles([after / before for before, after in pairwise(theirs) if before]),
        }
    return summary | dataclasses.asdict(others)


def quartiles(values: list[float]) -> dict[str, float]:
    """The median; and quartiles in the places of the extremes, since some of many blocks are disturbed."""
    if len(values) < 2:
        return {"median": 0.0, "min": 0.0, "max": 0.0}
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "min": low, "max": high}


def show(summary: dict[str, Any]) -> None:
    """One script as a table."""
    rows = [[f"{summary['loop']}, {summary['pairs']} pairs of {summary['block']} steps", *LAUNCHERS, "ratio", "more"]]
    for label, figure in TIMES:
        values = summary[figure]
        cells = [scaled(quartiles(values[launcher]), 1e3, 3) for launcher in LAUNCHERS]
        rows.append([label, *cells, formatted(values["ratio"], 3), scaled(values["more"], 1e3, 3)])
    rows.append(["  torchrun, block by block", "", "", formatted(summary["main_step_s"]["torchrun_ratio"], 3), ""])
    peaks = [(label, [max(summary[figure][launcher]) for launcher in LAUNCHERS]) for label, figure in MEMORY]
    for label, figure in (("peak memory of the launcher, MiB", "launcher_bytes"), ("  of standbys", "standbys_bytes")):
        if summary[figure]:
            peaks.append((label, [summary[figure][launcher] for launcher in LAUNCHERS]))
    for label, (before, under) in peaks:
        rows.append([label, f"{before / MIB:.1f}", f"{under / MIB:.1f}", "", f"{(under - before) / MIB:.1f}"])
    print(f"\n{summary['loop']}: {summary['what']}; median (quartiles)")
    print_table(rows)


def overview(summaries: list[dict[str, Any]]) -> None:
    """One line a script."""
    rows = [["main thread, processor ms a step", *LAUNCHERS, "ratio", "more", "median step's", "all threads'"]]
    for summary in summaries:
        main = summary["main_step_s"]
        cells = [f"{statistics.median(main[launcher]) * 1e3:.2f}" for launcher in LAUNCHERS]
        cells += [formatted(main["ratio"], 3), scaled(main["more"], 1e3, 2)]
        cells += [f"{summary[figure]['ratio']['median']:.3f}" for figure in ("median_main_step_s", "cpu_step_s")]
        rows.append([summary["loop"], *cells])
    print()
    print_table(rows)


def scaled(spread: dict[str, float], factor: float, digits: int) -> str:
    """A spread in another unit, as text."""
    return formatted({name: value * factor for name, value in spread.items()}, digits)


def main() -> int:
    """Measure and print; returns the exit code: 1 if a run has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"{EVERYTHING}, or of: {', '.join(LOOPS)}")
    parser.add_argument("--quick", action="store_true", help="no standby, fewer pairs: about a minute a script")
    parser.add_argument("--ranks", type=positive, default=2, help="default 2")
    parser.add_argument("--blocks", type=positive, help="pairs of blocks (default 30, with --quick 24)")
    parser.add_argument("--block", type=positive, help="steps of a block (default: about a second)")
    parser.add_argument(
        "--limit-s", type=float, default=240.0, help="of a script: no more pairs after that (default 240)"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the runs' logs there; must not exist")
    options = parser.parse_args()
    names = list(LOOPS) if EVERYTHING in options.scripts else options.scripts or list(DEFAULT)
    if unknown := [name for name in names if name not in LOOPS]:
        parser.error(f"no such script: {', '.join(unknown)}")
    before = machine()
    print(headline(before), flush=True)
    summaries, failed = [], False
    with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
        for name in names:
            try:
                summary = measure(name, options, options.folder or Path(scratch))
            except BenchmarkError as error:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            summaries.append(summary)
            show(summary)
            sys.stdout.flush()
            if options.json:
                figures = {"machine": before, "load_at_end": machine()["load"], "summaries": summaries}
                options.json.write_text(json.dumps(figures, indent=1))
    if len(summaries) > 1:
        overview(summaries)
    print(f"\nat the end: {headline(machine())}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
