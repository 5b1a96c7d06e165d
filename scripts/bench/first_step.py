"""How long a job takes from the command to its first step: the same script under torchrun and ttprun, in turns.

    python scripts/bench/first_step.py --pairs 5

The order of the two launchers changes from pair to pair. On a machine with other load only the ratios of pairs mean
something. The times are the script's own: it logs when it has completed a step. Begin with measure().
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

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
from steplog import read_logs, wait_for_step


def measure(launcher: str, ranks: int, folder: Path) -> float:
    """Seconds from the launcher's start until all ranks have completed a step. Raises BenchmarkError."""
    began_s = time.time()
    with Run(launcher, ranks, folder, arguments=["--step-logs={folder}/logs", "--steps=100000"]) as run:
        for rank in range(ranks):
            wait_for_step(run, 0, rank)
        firsts = [next(line.at_s for line in log if line.step == 0) for log in read_logs(run)]
    return max(firsts) - began_s


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=5, help="default 5")
    parser.add_argument("--ranks", type=positive, default=2, help="default 2")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    before = machine()
    print(headline(before), flush=True)
    times_s: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    try:
        with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
            for pair in range(options.pairs):
                for launcher in LAUNCHERS if pair % 2 == 0 else LAUNCHERS[::-1]:
                    times_s[launcher].append(measure(launcher, options.ranks, Path(scratch) / f"{pair}-{launcher}"))
                print(" ".join(f"{launcher} {times_s[launcher][-1]:.2f} s" for launcher in LAUNCHERS), flush=True)
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    ratios = spread(ours / theirs for ours, theirs in zip(times_s[TTPRUN], times_s[TORCHRUN], strict=True))
    times = [formatted(spread(times_s[launcher])) for launcher in LAUNCHERS]
    print_table(
        [
            [f"{options.ranks} ranks: median (min-max)", *LAUNCHERS, "ttprun/torchrun, pair by pair"],
            ["command to first step, s", *times, formatted(ratios)],
        ]
    )
    print(f"at the end: {headline(machine())}")
    if options.json:
        options.json.write_text(json.dumps({"machine": before, "seconds": times_s, "ratio": ratios}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
