"""What is left of a training job's time when ranks are killed again and again, under torchrun and under ttprun.

    python scripts/bench/faults.py --ranks 2 --steps 1500 --every 30 --seed 0 --json faults.json

The same script trains the same number of steps under each launcher, one after the other. Faults come at a fixed mean
rate: the times and the ranks are drawn from the seed, so they are the same for all. The clock of the faults starts when
all ranks have completed a step. Each is a SIGKILL to the process that is the rank at that moment; if there is none, to
the next one, as soon as its log names it. First the job runs without a fault, under torchrun: the weights at its end
are those that the others must have, bit for bit.

    goodput = steps of the job x median time of a step in this run / time from the start of the launcher to its end

What a step costs is each run's own, so that a load of the machine that changes from run to run falls out.

torchrun restarts all ranks, and the script resumes from its newest checkpoint. It has
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it mostly fails to restart.

    python scripts/bench/faults.py --with torchft nvrx

Two others, too, by copies of the script that have the changes which they ask for: torchft, and the in-process restart
of nvidia-resiliency-ext with spares (peers/). They are installed in the user's cache folder. Begin with measure().
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from peers.environments import PEERS, prepare
from runs import LAUNCHERS, SCRIPT, TORCHRUN, TTPRUN, BenchmarkError, Run, headline, machine, positive, print_table
from steplog import LOOK_AGAIN_S, START_LIMIT_S, Line, read_log, read_logs


@dataclass(frozen=True)
class Fault:
    """A rank is killed so many seconds after all ranks have completed a step."""

    after_s: float
    rank: int


@dataclass
class Outcome:
    """What a job came to.

    faults       that have struck; the job may end before others are due
    late         those of them that had to wait for a process
    whole_s      from the start of the launcher to its end
    step_s       median time from one step to the next in one process
    run_again    steps that a rank has completed more than once, of the rank with most
    weights      hash of the weights at the end
    problem      why the job has failed, "" if it has not
    """

    launcher: str
    faults: int = 0
    late: int = 0
    whole_s: float = 0.0
    step_s: float = 0.0
    run_again: int = 0
    weights: str = ""
    problem: str = ""


def draw_faults(seed: int, ranks: int, every_s: float) -> Iterator[Fault]:
    """Faults without end, at a mean rate of one in `every_s` seconds; the same seed gives the same ones."""
    chance, at_s = random.Random(seed), 0.0
    while True:
        at_s += chance.expovariate(1.0 / every_s)
        yield Fault(at_s, chance.randrange(ranks))


def measure(outcome: Outcome, options: argparse.Namespace, folder: Path, faults: Iterator[Fault]) -> None:
    """One job to its end, or until it has failed; fills in the outcome."""
    arguments = ["--step-logs={folder}/logs", "--checkpoint={folder}/last.pt", f"--steps={options.steps}"]
    arguments += [f"--checkpoint-every={options.checkpoint_every}", *options.script_arguments]
    command, script = (), SCRIPT
    if (peer := PEERS.get(outcome.launcher)) is not None:
        command, script = (str(prepare(outcome.launcher)), str(peer.job)), peer.script
    began_s = time.time()
    restarts = ("--max-restarts", "10000")
    with Run(outcome.launcher, options.ranks, folder, restarts, arguments, script, command=command) as run:
        try:
            strike(run, outcome, faults, options.limit)
        except BenchmarkError as error:
            outcome.problem = str(error)
        outcome.whole_s = time.time() - began_s
        note(outcome, read_logs(run))
        outcome.weights = run.weights()


def strike(run: Run, outcome: Outcome, faults: Iterator[Fault], limit_s: float) -> None:
    """Kill ranks until the job has ended. Raises BenchmarkError if it fails, or does not end in time."""
    wait_until(run, lambda: all(any(line.step is not None for line in log) for log in read_logs(run)), START_LIMIT_S)
    began_s = time.monotonic()
    for fault in faults:
        due_s = began_s + fault.after_s
        if wait_until(run, lambda due_s=due_s: time.monotonic() >= due_s, limit_s):  # type: ignore[misc]
            break
        outcome.late += not is_alive(read_log(run, fault.rank)[-1].pid)
        if wait_until(run, lambda rank=fault.rank: is_alive(read_log(run, rank)[-1].pid), limit_s):  # type: ignore[misc]
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(read_log(run, fault.rank)[-1].pid, signal.SIGKILL)
            outcome.faults += 1
    run.finish(limit_s)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(run: Run, is_so: Any, limit_s: float) -> bool:
    """Block until this is so, or the job has ended, which is returned. Raises BenchmarkError after `limit_s`."""
    give_up_at_s = time.monotonic() + limit_s
    while not is_so():
        if run.process.poll() is not None:
            return True
        if time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"it did not get on within {limit_s:.0f} s; {run.last_words()}")
        time.sleep(LOOK_AGAIN_S)
    return False


def note(outcome: Outcome, logs: Sequence[Sequence[Line]]) -> None:
    """What the ranks' logs say of the job."""
    between = [
        after.at_s - before.at_s
        for log in logs
        for before, after in pairwise(log)
        if before.step is not None and after.step is not None and before.pid == after.pid
    ]
    outcome.step_s = median(between) if between else 0.0
    steps = [[(line.step, line.at_s) for line in log if line.step is not None] for log in logs]
    outcome.run_again = max((len(log) - len({step for step, _ in log}) for log in steps), default=0)


def goodput(outcome: Outcome, steps: int) -> float:
    """The share of a job's time that was needed for its steps; 0 if it has failed."""
    return 0.0 if outcome.problem else steps * outcome.step_s / outcome.whole_s


def show(outcomes: Sequence[Outcome], undisturbed: Outcome, steps: int) -> None:
    """All jobs as a table."""
    rows = [["", *(outcome.launcher for outcome in (undisturbed, *outcomes))]]
    rows[0][1] = "no fault (torchrun)"
    every = (undisturbed, *outcomes)
    rows.append(
        ["faults (of them late: nobody was there)", *(f"{outcome.faults} ({outcome.late})" for outcome in every)]
    )
    rows.append(["a step, median, s", *(f"{outcome.step_s:.3f}" for outcome in every)])
    rows.append(["whole job, s", *(f"{outcome.whole_s:.1f}" for outcome in every)])
    rows.append(["goodput", *(f"{goodput(outcome, steps):.3f}" for outcome in every)])
    rows.append(["steps run again", *(str(outcome.run_again) for outcome in every)])
    rows.append(["weights as without a fault", *(is_identical(outcome, undisturbed) for outcome in every)])
    print()
    print_table(rows)
    for outcome in every:
        if outcome.problem:
            print(f"{outcome.launcher} FAILED: {outcome.problem}")


def is_identical(outcome: Outcome, undisturbed: Outcome) -> str:
    """Whether the weights are bit for bit those without a fault."""
    return "identical" if outcome.weights and outcome.weights == undisturbed.weights else "DIFFERENT"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=1500)
    parser.add_argument(
        "--every", type=float, default=30.0, help="mean seconds from one fault to the next (default 30)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--checkpoint-every", type=positive, default=50, help="steps (default 50)")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that a job may last")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the jobs' logs there; must not exist")
    parser.add_argument("--with", nargs="+", default=[], choices=list(PEERS), dest="peers", help="these as well")
    parser.add_argument("script_arguments", nargs="*", help="additional arguments of train.py, after --")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    before = machine()
    print(headline(before), flush=True)
    with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
        root = options.folder or Path(scratch)
        undisturbed = Outcome(TORCHRUN)
        print(f"{TORCHRUN} without a fault, {options.steps} steps ...", flush=True)
        measure(undisturbed, options, root / "undisturbed", iter(()))
        outcomes = []
        for launcher in (*LAUNCHERS, *options.peers):
            outcome = Outcome(launcher)
            print(f"{launcher}, a fault in {options.every:g} s on average ...", flush=True)
            measure(outcome, options, root / launcher, draw_faults(options.seed, options.ranks, options.every))
            print(f"{launcher}: {outcome.whole_s:.1f} s, {outcome.faults} faults {outcome.problem}", flush=True)
            outcomes.append(outcome)
    show(outcomes, undisturbed, options.steps)
    after = machine()
    print(f"\nat the end: {headline(after)}")
    if options.json:
        asked = {name: getattr(options, name) for name in ("ranks", "steps", "every", "seed", "checkpoint_every")}
        figures = {"machine": before, "load_at_end": after["load"], "asked": asked}
        jobs = [asdict(outcome) | {"goodput": goodput(outcome, options.steps)} for outcome in (undisturbed, *outcomes)]
        options.json.write_text(json.dumps(figures | {"jobs": jobs}, indent=1))
    return int(
        any(is_identical(outcome, undisturbed) != "identical" for outcome in outcomes if outcome.launcher == TTPRUN)
    )


if __name__ == "__main__":
    sys.exit(main())
