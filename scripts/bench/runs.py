"""What the benchmarks share: a run of a script under a launcher, and figures with their spread.

Begin with `Run`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ttprun.chaos.trial.twins import clean_environment, end_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).resolve().parent / "train.py"
TORCHRUN, TTPRUN = LAUNCHERS = ("torchrun", "ttprun")
MODULES = {TORCHRUN: "torch.distributed.run", TTPRUN: "ttprun"}
STOP_LIMIT_S = 10.0


class BenchmarkError(Exception):
    """A run did not do what the benchmark needs; the message is for the person who measures."""


def _leave(number: int, _: object) -> None:
    """A benchmark that is ended by a signal ends its runs, too."""
    sys.exit(128 + number)


class Run:
    """One launcher at work on a script, in a folder of its own; a context, whose end ends every process of it.

    launcher   "torchrun" or "ttprun", or the name of another one
    ranks      local ranks, one thread each
    folder     empty or absent; gets logs/, reports/, launcher.log and what the launcher writes
    options    of the launcher
    arguments  of the script; `{folder}` stands for the folder
    script     train.py, unless another one is named
    within     a command that runs the launcher, which keeps its pid: on another node, say
    command    of the launcher, if it is neither of these two; it takes their options
    extra      of its environment, beside what all have
    """

    def __init__(
        self,
        launcher: str,
        ranks: int,
        folder: Path,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        script: Path = SCRIPT,
        within: Sequence[str] = (),
        command: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)
        self.launcher, self.ranks, self.folder = launcher, ranks, folder
        self.logs, self.reports, self.run_dir = folder / "logs", folder / "reports", folder / "run"
        for path in (self.logs, self.reports):
            path.mkdir(parents=True)
        # torchrun makes its directory for logs in /tmp, and leaves it there, unless a directory is named.
        ours = ["--run-dir", str(self.run_dir)] if launcher == TTPRUN else ["--log-dir", str(folder / "torchrun-logs")]
        with open(folder / "launcher.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *within,
                    *(command or (sys.executable, "-m", MODULES[launcher])),
                    "--nproc-per-node",
                    str(ranks),
                    *ours,
                    *options,
                    str(script),
                ]
                + [argument.format(folder=folder) for argument in arguments],
                cwd=folder,
                env=environment(launcher) | dict(extra or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        alive: list[psutil.Process] = psutil.wait_procs(family, STOP_LIMIT_S)[1]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def finish(self, limit_s: float) -> None:
        """Wait for the end. Raises BenchmarkError if the run takes longer than `limit_s`, or fails."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"it did not end within {limit_s:.0f} s") from None
        if code != 0:
            raise BenchmarkError(f"exit code {code}; {self.last_words()}")

    def last_words(self) -> str:
        """The line of the output that says what went wrong: the first one with an error in it, else the last one."""
        lines = [line.strip() for line in self.output().splitlines()]
        errors = [line for line in lines if "rror:" in line]
        return (errors or lines[-1:] or ["no output"])[0][:160]

    def output(self) -> str:
        """What the launcher and its ranks have written so far."""
        return (self.folder / "launcher.log").read_text(encoding="utf-8", errors="replace")

    def weights(self) -> str:
        """The hash of the weights that the script printed last, "" if it printed none."""
        hashes = re.findall(r"sha256 ([0-9a-f]{64})", self.output())
        return hashes[-1] if hashes else ""


def environment(launcher: str) -> dict[str, str]:
    """The environment of a launcher: ours without what would steer it, one thread a rank, and ttprun importable."""
    clean = clean_environment()
    clean["OMP_NUM_THREADS"] = "1"
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), clean.get("PYTHONPATH"))))
    if launcher == TORCHRUN:
        # By default the ranks of the second attempt find the first one's addresses, and 4 gloo ranks never recover.
        clean["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return clean


def machine() -> dict[str, Any]:
    """Where and when this was measured."""
    from torch import __version__ as torch_version

    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "torch": torch_version,
        "python": sys.version.split()[0],
    }


def headline(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    load = " ".join(f"{value:.2f}" for value in machine["load"])
    return f"{machine['at']}, {machine['cpus']} CPUs, load {load}, torch {machine['torch']}, Python {machine['python']}"


def positive(text: str) -> int:
    """An integer from 1, as the type of an option of argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is less than 1")
    return number


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, least and greatest of the values that are known; None if there are none."""
    numbers = [value for value in values if value is not None]
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)} if numbers else None


def formatted(quartiles: dict[str, float] | None, digits: int = 2) -> str:
    """A spread as text: `0.52 (0.48-0.71)`; `-` for None."""
    if quartiles is None:
        return "-"
    return f"{quartiles['median']:.{digits}f} ({quartiles['min']:.{digits}f}-{quartiles['max']:.{digits}f})"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns: the first one to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
