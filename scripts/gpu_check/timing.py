"""Part G: from a kill to the next step, in parts, with a standby that is ready; memory that comes back meanwhile.

Begin with `times`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_memory import GpuMemory
from jobs import SCRIPTS, described, environment, last_words
from parts import Place, Row, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from runs import TORCHRUN, TTPRUN, BenchmarkError, Run, formatted, spread

from ttprun.observe.events import read_events
from ttprun.observe.status import RunStatus, read_status

LOOK_S = 0.05
STEPS = 1_000_000  # it is ended when all has been seen
PHASES = ("backward", "collective")
AFTER_S = 3.0  # how long memory is looked at after a kill
MIB = 1 << 20


class NotComeError(Exception):
    """What was waited for has not come."""


class MemoryCurve:
    """The GPU's used memory, again and again on a thread: monotonic seconds and MiB. Empty without NVML."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._stopped = threading.Event()
        with contextlib.suppress(OSError):
            memory = GpuMemory()
            threading.Thread(target=self._look, args=(memory,), daemon=True).start()

    def _look(self, memory: GpuMemory) -> None:
        with contextlib.suppress(OSError):
            while not self._stopped.wait(LOOK_S):
                self.points.append((time.monotonic(), memory.used_mib()))

    def stop(self) -> None:
        """No more points."""
        self._stopped.set()

    def between(self, from_s: float, to_s: float) -> list[int]:
        """MiB at that time."""
        return [used for at_s, used in self.points if from_s <= at_s <= to_s]


def times(place: Place) -> list[Task] | str:
    """Part G."""
    tasks = [Task("from a kill to the next step", 120, partial(kill_warm, place))]
    tasks.append(Task("communicators", 60, partial(communicators, place)))
    if place.kind == "cuda":
        tasks.append(Task("memory of a killed process", 40, dead_memory))
    return tasks


def kill_warm(place: Place, limit_s: float) -> Iterator[Row]:
    """One run, a kill in each of PHASES, each when a standby with the ranks' imports is ready."""
    ends_s = time.monotonic() + limit_s
    folder, curve = place.folder / "warm", MemoryCurve()
    before_mib = curve.between(0, float("inf"))[:1]
    arguments = ["--out={folder}/out", "--layout=ddp", "--with=loss,times", f"--steps={STEPS}"]
    arguments += ["--share"] if place.shares else []
    options = ["--standalone", "--allow-faults", "--redirects", "3", "--log-dir", str(folder / "logs")]
    with Run(TTPRUN, place.ranks, folder, options, arguments, SCRIPTS / "device_layouts.py") as run:
        try:
            for number, phase in enumerate(PHASES):
                ready_s = _until(lambda: _is_warm(run.run_dir), ends_s, "the standby is not ready")
                if number == 0:
                    yield _standby(run, curve, before_mib)
                fault = ["kill", "--rank", "1", "--phase", phase]
                _inject(run.run_dir, fault, ends_s)
                count = number + 1
                _until(lambda count=count: len(_done(run.run_dir)) >= count, ends_s, "there is no recovery")
                time.sleep(AFTER_S)  # memory of the dead process, and the first steps
                yield from _one_kill(run, phase, number, curve, ready_s)
        except NotComeError as error:
            yield Row("from a kill to the next step", "FAILED", str(error), last_words(folder))
        finally:
            curve.stop()
            run.process.kill()  # its ranks die with it; as a scheduler's notice SIGTERM would take a checkpoint
            run.process.wait(10)


def _one_kill(run: Run, phase: str, number: int, curve: MemoryCurve, ready_s: float) -> Iterator[Row]:
    incident = _done(run.run_dir)[number]
    events = list(read_events(run.run_dir / "events.jsonl"))
    killed_s = [event["at_s"] for event in events if event["event"] == "fault_injected"][number]
    steps = _steps(run.folder)
    usual_s = statistics.median(after - before for before, after in pairwise(steps))
    # The other rank may still end the step in which this one dies, so the kill's cost is the longest wait after it.
    gap_s = max((after - before for before, after in pairwise(steps) if after > killed_s), default=None)
    text = (
        f"no step in {AFTER_S:.0f} s"
        if gap_s is None
        else f"{gap_s:.2f} s to the end of the next step (one takes {usual_s * 1e3:.0f} ms)"
    )
    is_well = incident.rung == "replace" and gap_s is not None
    values = {"incident": vars(incident), "gap_s": gap_s, "step_s": usual_s, "standby_ready_s": ready_s}
    name = f"killed in {phase}, the standby was ready"
    yield Row(name, "ok" if is_well else "FAILED", f"{text}; {described(incident)}", (), values)
    around = curve.between(killed_s - 1, killed_s), curve.between(killed_s, killed_s + AFTER_S)
    if all(around):
        least = min(around[1])
        at_s = next(at_s for at_s, used in curve.points if at_s >= killed_s and used == least) - killed_s
        text = f"{around[0][-1]} MiB before, least {least} after {at_s:.2f} s, {around[1][-1]} after {AFTER_S:.0f} s"
        points = [(round(at - killed_s, 2), used) for at, used in curve.points if -0.5 < at - killed_s < AFTER_S]
        yield Row(f"the GPU's memory around the kill in {phase}", "seen", text, values={"curve": points})


def _standby(run: Run, curve: MemoryCurve, before_mib: list[int]) -> Row:
    """What a standby holds, on the host and on the GPU."""
    from step_cost import Standby

    seen = Standby()
    seen.look(run.process.pid)
    on_gpu = "a context on the GPU" if seen.holds else "no context on a GPU"
    used = curve.between(0, float("inf"))
    gpu = f"; the GPU has {used[-1]} MiB in use, {before_mib[0]} before the job" if used and before_mib else ""
    return Row("a standby that is ready", "seen", f"{seen.memory / MIB:.0f} MiB of its own on the host, {on_gpu}{gpu}")


def _is_warm(run_dir: Path) -> bool:
    status = _status(run_dir)
    if status is None or status.state in ("failed", "stopped", "done"):
        return False
    is_ready = status.standbys > 0 and status.standby_state.startswith("ready") and status.state == "healthy"
    return is_ready and "it now imports" not in status.standby_state and status.protection == "on"


def _done(run_dir: Path) -> list[Any]:
    status = _status(run_dir)
    return [incident for incident in status.incidents if incident.outcome != "open"] if status else []


def _status(run_dir: Path) -> RunStatus | None:
    with contextlib.suppress(OSError, ValueError):
        return read_status(run_dir / "status.json")
    return None


def _inject(run_dir: Path, fault: list[str], ends_s: float) -> None:
    words = [sys.executable, "-m", "ttprun", "inject-fault", *fault, "--run", str(run_dir)]
    limit_s = max(1.0, ends_s - time.monotonic())
    done = subprocess.run(
        words, env=os.environ | environment(), capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise NotComeError(f"inject-fault: {(done.stderr or done.stdout).strip()[-300:]}")


def _until(is_so: Callable[[], bool], ends_s: float, otherwise: str) -> float:
    """Wait for something; returns the seconds that it took. Raises NotComeError at `ends_s`."""
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() > ends_s:
            raise NotComeError(f"{otherwise} after {time.monotonic() - began_s:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


def _steps(folder: Path) -> list[float]:
    """When rank 0's steps have ended, by the machine's monotonic clock."""
    times_s: list[float] = []
    for path in sorted(folder.glob("logs/*/attempt_*/0/stdout.log")):
        times_s += map(float, re.findall(r" ended at ([0-9.]+)\n", path.read_text(errors="replace")))
    return sorted(times_s)


def communicators(place: Place, limit_s: float) -> Iterator[Row]:
    """How long a new communicator takes, and an abort."""
    script, folder = Path(__file__).with_name("communicators.py"), place.folder / "communicators"
    arguments = [f"--device={place.kind}", f"--backend={place.backend}", *(["--share"] if place.shares else [])]
    with Run(TORCHRUN, place.ranks, folder, ["--standalone"], arguments, script) as run:
        try:
            run.finish(limit_s)
            failure = ""
        except BenchmarkError as error:
            failure = str(error)
        took: dict[str, list[float]] = {}
        for line in run.output().splitlines():
            if line.startswith("{"):
                told = json.loads(line)
                took.setdefault(told["what"], []).append(told["seconds"])
    names = {"new": "a new communicator", "abort": "an abort at rest", "busy": "an abort with a collective under way"}
    for what, seconds in took.items():
        in_ms = formatted(spread(value * 1e3 for value in seconds), 1)
        name = f"{names[what]}, {place.ranks} ranks, {place.backend}"
        yield Row(name, "seen", f"{in_ms} ms", values={"seconds": seconds})
    if failure:
        yield Row("communicators", "FAILED", failure, last_words(folder))


_HOLDER = """
import sys, time, torch
held = torch.ones(2 << 30, dtype=torch.uint8, device="cuda"); torch.cuda.synchronize()
print("ready", flush=True); sys.stdin.read()
"""


def dead_memory(limit_s: float) -> Iterator[Row]:
    """A process with 2 GiB on the GPU is killed: how soon is it over, and is its memory back?"""
    memory = GpuMemory()
    before = memory.used_mib()
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    limit = threading.Timer(limit_s, process.kill)
    limit.start()
    try:
        if process.stdout is None or not process.stdout.readline():
            yield Row("memory of a killed process", "FAILED", "it could not take 2 GiB of the GPU")
            return
        used_mib = memory.used_mib()
        killed_s = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait(limit_s)
        over_s = time.monotonic() - killed_s
        while memory.used_mib() > before + 64 and time.monotonic() - killed_s < limit_s:
            time.sleep(0.005)
        back_s = time.monotonic() - killed_s
    finally:
        limit.cancel()
        process.kill()
    left_mib = memory.used_mib() - before
    text = (
        f"{used_mib - before} MiB held; its exit is seen after {over_s:.2f} s, its memory is back after {back_s:.2f} s"
    )
    verdict = "seen" if left_mib <= 64 else "FAILED"
    yield Row(
        "memory of a killed process",
        verdict,
        f"{text}, {left_mib} MiB are left",
        values={"exit_s": over_s, "back_s": back_s},
    )
