"""What a step of GPT-2's size takes under torchrun and under ttprun, in turns, and what a standby holds meanwhile."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from runs import LAUNCHERS, TORCHRUN, TTPRUN, BenchmarkError, Run, spread

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpt2.py"
LOOK_S = 0.5
MIB = 1 << 20


@dataclass
class Standby:
    """The most that was seen of a standby.

    memory  bytes of its own on the host, shared pages left out
    holds   whether it had a context on a GPU, which costs some hundred MiB there
    """

    memory: int = 0
    holds: bool = False

    def look(self, launcher: int) -> None:
        """Look at the standbys among a launcher's processes."""
        with contextlib.suppress(psutil.Error, OSError):
            for process in psutil.Process(launcher).children(recursive=True):
                if "ttprun.rank.bootstrap.standby" in process.cmdline():
                    self.memory = max(self.memory, process.memory_full_info().uss)
                    opened = [path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
                    self.holds |= Path("/dev/nvidia-uvm") in opened


@dataclass
class StepCost:
    """What was measured.

    medians  launcher -> median seconds of a step, one number a run
    weights  the hashes of all runs' weights
    """

    medians: dict[str, list[float]] = field(default_factory=lambda: {launcher: [] for launcher in LAUNCHERS})
    weights: set[str] = field(default_factory=set)
    standby: Standby = field(default_factory=Standby)

    @property
    def ratio(self) -> dict[str, float] | None:
        """ttprun's step divided by torchrun's, run by run."""
        pairs = zip(self.medians[TTPRUN], self.medians[TORCHRUN], strict=True)
        return spread(ours / theirs for ours, theirs in pairs)

    @property
    def is_identical(self) -> bool:
        """Whether all runs came to the same weights."""
        return len(self.weights) == 1 and "" not in self.weights


def measure(ranks: int, repeats: int, arguments: list[str], root: Path, left_s: Callable[[], float]) -> StepCost:
    """Run the step under both launchers in turns. Raises BenchmarkError if a run fails or takes longer than is left.

    arguments  of bench/gpt2.py
    left_s     seconds that may still be spent
    """
    cost = StepCost()
    for repeat in range(repeats):
        for launcher in LAUNCHERS:
            given = [*arguments, "--report={folder}/reports"]
            with Run(launcher, ranks, root / f"step-{repeat}-{launcher}", (), given, SCRIPT) as run:
                ends_s = time.monotonic() + left_s()
                while run.process.poll() is None and time.monotonic() < ends_s:
                    cost.standby.look(run.process.pid)
                    time.sleep(LOOK_S)
                if run.process.poll() is None:
                    raise BenchmarkError("the time is up")
                run.finish(LOOK_S)
            reports = [json.loads((run.reports / f"rank{rank}.json").read_text()) for rank in range(ranks)]
            cost.medians[launcher].append(statistics.mean(report["median_step_s"] for report in reports))
            cost.weights.add(run.weights())
    if not cost.standby.memory:
        raise BenchmarkError("no standby was seen beside the ranks")
    return cost
