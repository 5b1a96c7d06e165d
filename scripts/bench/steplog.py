"""The logs in which train.py reports when it has completed a step: one file a rank, continued after a restart.

Begin with `read_logs`.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from runs import BenchmarkError, Run

START_LIMIT_S = 120.0
LOOK_AGAIN_S = 0.01


class Line(NamedTuple):
    """One line: `word` is start, imported or step; `step` is None but for the last; `at_s` as time.time() counts."""

    word: str
    step: int | None
    at_s: float
    pid: int


class Setup(NamedTuple):
    """How a job got under way. Seconds, of the slowest rank.

    whole_s    from the start of the process to the end of its first step
    script_s   the part of it behind the script's imports
    step_s     median time of a step since, over all ranks; 0 if there was only one step
    """

    whole_s: float
    script_s: float
    step_s: float


def read_log(run: Run, rank: int) -> list[Line]:
    """The complete lines of a rank's log; [] if there is none."""
    path = run.logs / f"rank{rank}.log"
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text(encoding="ascii").split("\n")[:-1]]
    return [Line(word, None if step == "-" else int(step), float(at_s), int(pid)) for word, step, at_s, pid in words]


def read_logs(run: Run) -> list[list[Line]]:
    """The logs of all ranks, in the order of ranks."""
    return [read_log(run, rank) for rank in range(run.ranks)]


def wait_for_step(run: Run, step: int, rank: int) -> None:
    """Block until a rank has completed a step, at most START_LIMIT_S. Raises BenchmarkError if it does not."""
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while not any(line.step == step for line in read_log(run, rank)):
        if run.process.poll() is not None:
            raise BenchmarkError(f"it ended before step {step}; {run.last_words()}")
        if time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"step {step} was not done within {START_LIMIT_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def read_setup(logs: list[list[Line]]) -> Setup:
    """The set-up of a job that nothing has happened to yet; its ranks must be alive."""
    whole, script, between = [], [], []
    for log in logs:
        first = next(line for line in log if line.word == "step")
        imported = next(line for line in log if line.word == "imported")
        whole.append(first.at_s - _started_at_s(first.pid))
        script.append(first.at_s - imported.at_s)
        between += [after - before for before, after in pairwise(line.at_s for line in log if line.word == "step")]
    return Setup(max(whole), max(script), median(between) if between else 0.0)


def _started_at_s(pid: int) -> float:
    """When a living process was started, as time.time() counts, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
