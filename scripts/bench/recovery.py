"""How long a killed rank stops a job: the same script under torchrun, which restarts all ranks, and under ttprun.

    python scripts/bench/recovery.py --ranks 2 4 --kills 5 --json recovery.json

Each run loses one rank, chosen by chance, by a SIGKILL from outside, half way between two checkpoints of the script and
at a random moment of a step. The runs take turns, torchrun first, and the two runs of a turn lose the same rank at the
same moment of the step. torchrun has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it mostly fails to recover.
All times are the script's own: it logs when it has completed a step. Begin with measure().
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from runs import LAUNCHERS, TORCHRUN, TTPRUN, BenchmarkError, Run, headline, machine, print_table, spread, told

START_LIMIT_S = 120.0
LOOK_AGAIN_S = 0.01
PHASES = ("detect_s", "freeze_s", "spawn_s", "replay_s", "transfer_s", "rebuild_s", "reissue_s", "total_s")


class Line(NamedTuple):
    """One line of a rank's log: `word` is start, imported or step; `step` is None but for the last."""

    word: str
    step: int | None
    at_s: float
    pid: int


@dataclass
class Outcome:
    """What one kill came to. Seconds; None for what did not happen.

    next_step_s    from the kill to the next step that all ranks completed after it
    progress_s     from the kill to the first step that no rank had done before it, completed by all
    run_again      steps that every rank ran twice or more
    script_setup_s from the end of the script's imports to its first step, at the job's start, in the slowest rank
    setup_s        the same from the start of the process
    step_s         median time from one step to the next before the kill
    standbys       those that stood ready at the kill; None under torchrun
    incident       what ttprun says of it (`ttprun status --json`)
    weights        hash of the weights at the end
    problem        why the run has failed, "" if it has not
    """

    launcher: str
    ranks: int
    kill: int
    rank: int
    load: float
    after_step: int = -1
    next_step_s: float | None = None
    progress_s: float | None = None
    run_again: int | None = None
    script_setup_s: float | None = None
    setup_s: float | None = None
    step_s: float | None = None
    standbys: int | None = None
    incident: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    problem: str = ""

    @property
    def is_replaced(self) -> bool:
        """Whether ttprun has replaced the lost rank; False too if it fell back to a restart of all."""
        return self.incident.get("outcome") == "recovered"


def read_log(path: Path) -> list[Line]:
    """The complete lines of a rank's log; [] if there is none."""
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text(encoding="ascii").split("\n")[:-1]]
    return [Line(word, None if step == "-" else int(step), float(at_s), int(pid)) for word, step, at_s, pid in words]


def read_logs(run: Run) -> list[list[Line]]:
    """The logs of all ranks, in the order of ranks."""
    return [read_log(run.logs / f"rank{rank}.log") for rank in range(run.ranks)]


def started_at_s(pid: int) -> float:
    """When a living process was started, as time.time() counts."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def wait_for_step(run: Run, step: int, rank: int) -> None:
    """Block until a rank has completed a step, at most START_LIMIT_S. Raises BenchmarkError if it does not."""
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while not any(line.step == step for line in read_log(run.logs / f"rank{rank}.log")):
        if run.process.poll() is not None:
            raise BenchmarkError(f"it ended before step {step}; {run.last_words()}")
        if time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"step {step} was not done within {START_LIMIT_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def status_of(run: Run) -> dict[str, Any]:
    """ttprun's status; {} under torchrun."""
    path = run.run_dir / "status.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def note_start(run: Run, outcome: Outcome, logs: list[list[Line]]) -> None:
    """How long the job took to its first step, and how long a step takes; all ranks must be alive."""
    whole, script, steps = [], [], []
    for log in logs:
        first = next(line for line in log if line.word == "step")
        imported = next(line for line in log if line.word == "imported")
        whole.append(first.at_s - started_at_s(first.pid))
        script.append(first.at_s - imported.at_s)
        at_s = [line.at_s for line in log if line.word == "step"]
        steps += [after - before for before, after in pairwise(at_s)]
    outcome.setup_s, outcome.script_setup_s = max(whole), max(script)
    found = spread(steps)
    outcome.step_s = found["median"] if found else None


def note_recovery(outcome: Outcome, logs: list[list[Line]], killed_at_s: float) -> None:
    """How long it took from the kill until all ranks trained again. Raises BenchmarkError if they never did."""
    steps = [[(line.step, line.at_s) for line in log if line.step is not None] for log in logs]
    done_before = max(step for log in steps for step, at_s in log if at_s <= killed_at_s)
    after: list[dict[int, float]] = []
    for log in steps:
        # A step that was run several times counts when it was run first.
        after.append(dict(reversed([(step, at_s) for step, at_s in log if at_s > killed_at_s])))
    by_all = {step: max(log[step] for log in after) for step in set.intersection(*(set(log) for log in after))}
    beyond = [at_s for step, at_s in by_all.items() if step > done_before]
    if not beyond:
        raise BenchmarkError(f"no step beyond {done_before} was done after the kill")
    outcome.after_step = done_before
    outcome.next_step_s = min(by_all.values()) - killed_at_s
    outcome.progress_s = min(beyond) - killed_at_s
    times_run = [Counter(step for step, _ in log) for log in steps]
    outcome.run_again = sum(min(log[step] for log in times_run) > 1 for step in times_run[0])


def measure(launcher: str, options: argparse.Namespace, outcome: Outcome, moment: float, folder: Path) -> None:
    """One run with one kill; fills in the outcome.

    moment   of the step in which the rank is killed, 0 to 1
    """
    kill_after = options.checkpoint_every + options.checkpoint_every // 2 - 1
    arguments = ["--step-logs={folder}/logs", "--checkpoint={folder}/last.pt"]
    arguments += [f"--checkpoint-every={options.checkpoint_every}", f"--steps={2 * options.checkpoint_every + 10}"]
    ours = ["--max-restarts", "3"]
    if launcher == TTPRUN:
        ours += ["--standbys", str(options.standbys)]
    with Run(launcher, outcome.ranks, folder, ours, [*arguments, *options.script_arguments]) as run:
        try:
            wait_for_step(run, kill_after, outcome.rank)
            logs = read_logs(run)
            note_start(run, outcome, logs)
            outcome.standbys = status_of(run).get("standbys")
            pid = logs[outcome.rank][-1].pid
            time.sleep(moment * (outcome.step_s or 0.0))
            killed_at_s = time.time()
            os.kill(pid, signal.SIGKILL)
            run.finish(options.limit)
            note_recovery(outcome, read_logs(run), killed_at_s)
        except (BenchmarkError, OSError) as error:
            outcome.problem = str(error)
        outcome.incident = (status_of(run).get("incidents") or [{}])[0]
        outcome.weights = run.weights()


def describe(outcome: Outcome) -> str:
    """One run in one line."""
    if outcome.problem:
        return f"FAILED: {outcome.problem}"
    fallback = outcome.launcher == TTPRUN and not outcome.is_replaced
    return (
        f"next step {outcome.next_step_s:.2f} s, progress {outcome.progress_s:.2f} s, {outcome.run_again} run again, "
        f"set-up {outcome.setup_s:.2f} s, load {outcome.load:.1f}"
        + (f"; NOT REPLACED: {outcome.incident.get('reason', 'no incident')}" if fallback else "")
    )


def summarize(outcomes: list[Outcome], ranks: int) -> dict[str, Any]:
    """Spreads of the good runs by launcher, and ratios ttprun / torchrun of the turns in which both were good."""
    summary: dict[str, Any] = {"ranks": ranks}
    good = [outcome for outcome in outcomes if outcome.ranks == ranks and not outcome.problem]
    for launcher in LAUNCHERS:
        ours = [outcome for outcome in good if outcome.launcher == launcher]
        figures = {
            name: spread(getattr(outcome, name) for outcome in ours)
            for name in ("next_step_s", "progress_s", "run_again", "setup_s", "script_setup_s", "step_s")
        }
        for name in ("setup_s", "script_setup_s"):
            figures[f"next_step_less_{name}"] = spread(one.next_step_s - getattr(one, name) for one in ours)
        phases = {name: spread(outcome.incident.get(name) for outcome in ours) for name in PHASES}
        summary[launcher] = {
            "good_runs": len(ours),
            "replaced": sum(outcome.is_replaced for outcome in ours),
            "standby_ready": sum(bool(outcome.standbys) for outcome in ours),
            "different_weights": len({outcome.weights for outcome in ours}),
            **figures,
            "phases": phases,
        }
    base = {outcome.kill: outcome for outcome in good if outcome.launcher == TORCHRUN}
    pairs = [(one, base[one.kill]) for one in good if one.launcher == TTPRUN and one.kill in base]
    for name in ("next_step_s", "progress_s"):
        summary[f"ratio_{name}"] = spread(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
    return summary


def show(summary: dict[str, Any], kills: int) -> None:
    """A summary as a table."""
    both = [summary[launcher] for launcher in LAUNCHERS]
    rows = [[f"{summary['ranks']} ranks: median (min-max)", *LAUNCHERS, "ttprun/torchrun"]]
    rows.append(["runs that recovered", *(f"{found['good_runs']} of {kills}" for found in both), ""])
    for label, name, digits in (
        ("kill to next step on all ranks, s", "next_step_s", 2),
        ("kill to first step beyond, s", "progress_s", 2),
        ("steps run again by all ranks", "run_again", 0),
        ("set-up: process start to first step, s", "setup_s", 2),
        ("  of it after the script's imports, s", "script_setup_s", 2),
        ("kill to next step, less set-up, s", "next_step_less_setup_s", 2),
        ("  less set-up after the imports, s", "next_step_less_script_setup_s", 2),
        ("step before the kill, s", "step_s", 3),
    ):
        rows.append([label, *(told(found[name], digits) for found in both), told(summary.get(f"ratio_{name}"), 3)])
    rows.append(["different weights at the end", *(str(found["different_weights"]) for found in both), ""])
    print()
    print_table(rows)
    ours = summary[TTPRUN]
    print(f"ttprun: lost rank replaced in {ours['replaced']} runs; a standby was ready in {ours['standby_ready']}")
    print("        " + ", ".join(f"{name} {told(ours['phases'][name])}" for name in PHASES))


def main() -> int:
    """Measure and print; returns the exit code: 1 if a run under ttprun has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--kills", type=int, default=5, help="of each launcher, at each number of ranks (default 5)")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps (default 50)")
    parser.add_argument("--standbys", type=int, default=1, help="of ttprun (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are chosen (default 0)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds from the kill to the end of a run")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the runs' logs there; must not exist")
    parser.add_argument("script_arguments", nargs="*", metavar="-- ARGUMENT", help="further arguments of train.py")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    before, outcomes = machine(), list[Outcome]()
    print(headline(before), flush=True)
    with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
        root = options.folder or Path(scratch)
        turns = [(ranks, kill, launcher) for ranks in options.ranks for kill in range(options.kills)
                 for launcher in LAUNCHERS]  # fmt: skip
        rank, moment = 0, 0.0
        for number, (ranks, kill, launcher) in enumerate(turns, 1):
            if launcher == TORCHRUN:
                rank, moment = chance.randrange(ranks), chance.random()
            outcome = Outcome(launcher, ranks, kill, rank, load=round(os.getloadavg()[0], 2))
            measure(launcher, options, outcome, moment, root / f"{ranks}-{kill}-{launcher}")
            outcomes.append(outcome)
            place = f"rank {rank} after step {outcome.after_step}"
            print(f"[{number}/{len(turns)}] {launcher:8} {ranks} ranks, {place}: {describe(outcome)}", flush=True)
    summaries = [summarize(outcomes, ranks) for ranks in options.ranks]
    for summary in summaries:
        show(summary, options.kills)
    print(f"\nat the end: {headline(machine())}")
    if options.json:
        figures = {"machine": before, "load_at_end": machine()["load"], "summaries": summaries}
        options.json.write_text(json.dumps(figures | {"runs": [asdict(outcome) for outcome in outcomes]}, indent=1))
    return int(any(outcome.problem for outcome in outcomes if outcome.launcher == TTPRUN))


if __name__ == "__main__":
    sys.exit(main())
