"""How long a killed rank stops a job: the same script under torchrun, which restarts all ranks, and under ttprun.

    python scripts/bench/recovery.py --ranks 2 4 --kills 5 --json recovery.json

Each run loses one rank by a SIGKILL from outside, half way between two checkpoints of the script (late enough that
ttprun's standby, which starts after the first step, is ready) and at a random moment of a step. The ranks come in
random order, each before one comes twice. The runs take turns, torchrun first, and the two runs of a turn lose the same
rank at the same moment of the step. Before them one rank alone shows what the script's own set-up takes. torchrun has
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it mostly fails to recover 4 ranks.
All times are the script's own: it logs when it has completed a step. Begin with measure().

    python scripts/bench/recovery.py --framework lightning --ranks 2 --kills 3 --checkpoint-every 40

The same with the loop of a framework, whose script trains until the recovery is over, and is ended then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runs import (
    LAUNCHERS,
    SCRIPT,
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
from steplog import LOOK_AGAIN_S, Line, Setup, read_logs, read_setup, wait_for_step
from turns import FRAMEWORKS, wait_for_standby

ENDLESS = 1_000_000  # steps
PHASES = ("detect_s", "freeze_s", "spawn_s", "replay_s", "transfer_s", "rebuild_s", "reissue_s", "total_s")
# Label, name, digits: what is printed of each launcher.
FIGURES = (
    ("kill to next step on all ranks, s", "next_step_s", 2),
    ("kill to first new step, s", "progress_s", 2),
    ("kill to the end of the process, s", "gone_s", 3),
    ("kill to the agent's notice, s", "seen_s", 3),
    ("steps run again by all ranks", "run_again", 0),
    ("set-up of the job: start to first step, s", "setup_s", 2),
    ("  of it after the script's imports, s", "script_setup_s", 2),
    ("set-up of one rank alone, s", "alone_setup_s", 2),
    ("  of it after the script's imports, s", "alone_script_setup_s", 2),
    ("next step, less set-up alone, s", "less_setup_s", 2),
    ("  less its part after the imports, s", "less_script_setup_s", 2),
    ("one step before the kill, s", "step_s", 3),
)


@dataclass
class Outcome:
    """What one kill came to. Seconds; None for what did not happen.

    moment          of the step in which the rank is killed, 0 to 1
    after_step      last step that any rank had completed before the kill
    next_step_s     from the kill to the next step that all ranks completed after it
    progress_s      from the kill to the first step beyond `after_step`, completed by all ranks
    gone_s          from the kill until the process could be waited for: till then the kernel takes its memory back
    seen_s          from the kill until ttprun knew of it; None under torchrun, which looks every tenth of a second
    run_again       steps that every rank ran twice or more
    setup_s         from the start of the process to its first step, at the job's start, in the slowest rank
    script_setup_s  the part of it behind the script's imports
    step_s          a step's median time before the kill
    standbys        those that stood ready at the kill; None under torchrun
    incidents       what ttprun says of it, as in `ttprun status --json`
    weights         hash of the weights at the end
    killed_at_s     as time.time() counts
    problem         why the run has failed, "" if it has not
    """

    launcher: str
    ranks: int
    kill: int
    rank: int
    moment: float
    load: float
    alone_setup_s: float
    alone_script_setup_s: float
    after_step: int | None = None
    next_step_s: float | None = None
    progress_s: float | None = None
    less_setup_s: float | None = None
    less_script_setup_s: float | None = None
    gone_s: float | None = None
    seen_s: float | None = None
    run_again: int | None = None
    setup_s: float | None = None
    script_setup_s: float | None = None
    step_s: float | None = None
    standbys: int | None = None
    incidents: list[dict[str, Any]] = field(default_factory=list)
    weights: str = ""
    killed_at_s: float | None = None
    problem: str = ""

    @property
    def is_replaced(self) -> bool:
        """Whether ttprun has replaced the lost rank, and nothing else happened; False if it fell back to a restart."""
        return [incident["outcome"] for incident in self.incidents] == ["recovered"]

    def phase_s(self, name: str) -> float | None:
        """What a phase of the first incident took."""
        return self.incidents[0].get(name) if self.incidents else None


def measure_alone(folder: Path, script: Path, script_arguments: list[str]) -> Setup:
    """What the script's set-up takes if no other rank is in its way: a few steps of one rank under torchrun."""
    arguments = ["--step-logs={folder}/logs", "--steps=1000", *script_arguments]
    with Run(TORCHRUN, 1, folder, arguments=arguments, script=script) as run:
        wait_for_step(run, 0, rank=0)
        return read_setup(read_logs(run))


def measure(outcome: Outcome, options: argparse.Namespace, folder: Path) -> None:
    """One run with one kill; fills in the outcome."""
    every = options.checkpoint_every
    arguments = ["--step-logs={folder}/logs", "--checkpoint={folder}/last.pt", f"--checkpoint-every={every}"]
    arguments += [f"--steps={ENDLESS if options.framework else 2 * every + 10}", *options.script_arguments]
    ours = ["--standbys", str(options.standbys)] if outcome.launcher == TTPRUN else []
    with Run(
        outcome.launcher, outcome.ranks, folder, ["--max-restarts", "3", *ours], arguments, script_of(options)
    ) as run:
        try:
            wait_for_step(run, every + every // 2 - 1, outcome.rank)
            if options.framework and outcome.launcher == TTPRUN:
                wait_for_standby(run)
            logs = read_logs(run)
            outcome.setup_s, outcome.script_setup_s, outcome.step_s = read_setup(logs)
            outcome.standbys = status_of(run).get("standbys")
            time.sleep(outcome.moment * outcome.step_s)
            outcome.killed_at_s = killed_at_s = time.time()
            victim = logs[outcome.rank][-1].pid
            at_s = kill_and_wait(victim, outcome)
            if options.framework:
                wait_for_progress(run, read_logs(run), options.limit)
            else:
                run.finish(options.limit)
            outcome.seen_s = next((seen_s - at_s for seen_s in exits_of(run, victim)), None)
            note_recovery(outcome, read_logs(run), killed_at_s)
        except (BenchmarkError, OSError) as error:
            outcome.problem = str(error)
        outcome.incidents = status_of(run).get("incidents", [])
        outcome.weights = run.weights()


def script_of(options: argparse.Namespace) -> Path:
    """The script that is trained with."""
    return FRAMEWORKS[options.framework] if options.framework else SCRIPT


def wait_for_progress(run: Run, before: list[list[Line]], limit_s: float) -> None:
    """Block until all ranks are beyond the steps that any had completed. Raises BenchmarkError after `limit_s`."""
    newest = max(line.step for log in before for line in log if line.step is not None)
    give_up_at_s = time.monotonic() + limit_s
    while not all(log and (log[-1].step or 0) > newest + 1 for log in read_logs(run)):
        if time.monotonic() > give_up_at_s or run.process.poll() is not None:
            raise BenchmarkError(f"no step after {newest} within {limit_s:.0f} s; {run.last_words()}")
        time.sleep(LOOK_AGAIN_S)


def kill_and_wait(pid: int, outcome: Outcome) -> float:
    """SIGKILL to a rank; notes when it is gone. Blocks as long; returns when it was killed, in monotonic seconds."""
    pidfd = os.pidfd_open(pid)
    try:
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        gone.poll()
        outcome.gone_s = time.monotonic() - at_s
    finally:
        os.close(pidfd)
    return at_s


def exits_of(run: Run, pid: int) -> list[float]:
    """When ttprun saw a process end, in monotonic seconds; [] under torchrun."""
    path = run.run_dir / "events.jsonl"
    events = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [event["at_s"] for event in events if event["event"] == "rank_exited" and event["pid"] == pid]


def status_of(run: Run) -> dict[str, Any]:
    """ttprun's status; {} under torchrun."""
    path = run.run_dir / "status.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def note_recovery(outcome: Outcome, logs: list[list[Line]], killed_at_s: float) -> None:
    """How long it took from the kill until all ranks trained again. Raises BenchmarkError if they never did."""
    steps = [[(line.step, line.at_s) for line in log if line.step is not None] for log in logs]
    done_before = max(step for log in steps for step, at_s in log if at_s <= killed_at_s)
    after: list[dict[int, float]] = []
    for log in steps:
        # Of a step that was run several times after the kill, the first one counts.
        after.append(dict(reversed([(step, at_s) for step, at_s in log if at_s > killed_at_s])))
    by_all = {step: max(log[step] for log in after) for step in set.intersection(*(set(log) for log in after))}
    beyond = [at_s for step, at_s in by_all.items() if step > done_before]
    if not beyond:
        raise BenchmarkError(f"no step after {done_before} was done after the kill")
    outcome.after_step = done_before
    outcome.next_step_s = min(by_all.values()) - killed_at_s
    outcome.progress_s = min(beyond) - killed_at_s
    outcome.less_setup_s = outcome.next_step_s - outcome.alone_setup_s
    outcome.less_script_setup_s = outcome.next_step_s - outcome.alone_script_setup_s
    times_run = [Counter(step for step, _ in log) for log in steps]
    outcome.run_again = sum(min(log[step] for log in times_run) > 1 for step in times_run[0])


def describe(outcome: Outcome) -> str:
    """One run in one line."""
    which = f"{outcome.launcher:8} {outcome.ranks} ranks, rank {outcome.rank}"
    if outcome.problem:
        return f"{which}: FAILED: {outcome.problem}"
    is_fallback = outcome.launcher == TTPRUN and not outcome.is_replaced
    reasons = "; ".join(incident["reason"] for incident in outcome.incidents) or "no incident"
    return (
        f"{which} killed after step {outcome.after_step}: next step {outcome.next_step_s:.2f} s, "
        f"progress {outcome.progress_s:.2f} s, {outcome.run_again} run again, set-up {outcome.setup_s:.2f} s "
        f"(alone {outcome.alone_setup_s:.2f}), load {outcome.load:.1f}"
        + (f"; NOT ONLY REPLACED: {reasons}" if is_fallback else "")
    )


def summarize(outcomes: list[Outcome], ranks: int) -> dict[str, Any]:
    """Spreads of the good runs by launcher, and ratios ttprun / torchrun of the turns in which both were good."""
    summary: dict[str, Any] = {"ranks": ranks}
    good = [outcome for outcome in outcomes if outcome.ranks == ranks and not outcome.problem]
    for launcher in LAUNCHERS:
        ours = [outcome for outcome in good if outcome.launcher == launcher]
        summary[launcher] = {
            "good_runs": len(ours),
            "replaced": sum(outcome.is_replaced for outcome in ours),
            "standby_ready": sum(bool(outcome.standbys) for outcome in ours),
            "different_weights": len({outcome.weights for outcome in ours}),
            "phases": {name: spread(outcome.phase_s(name) for outcome in ours) for name in PHASES},
            **{name: spread(getattr(outcome, name) for outcome in ours) for _, name, _ in FIGURES},
        }
    base = {outcome.kill: outcome for outcome in good if outcome.launcher == TORCHRUN}
    pairs = [(outcome, base[outcome.kill]) for outcome in good if outcome.launcher == TTPRUN and outcome.kill in base]
    for name in ("next_step_s", "progress_s"):
        summary[f"ratio_{name}"] = spread(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
    return summary


def show(summary: dict[str, Any], kills: int) -> None:
    """A summary as a table."""
    both = [summary[launcher] for launcher in LAUNCHERS]
    rows = [[f"{summary['ranks']} ranks: median (min-max)", *LAUNCHERS, "ttprun/torchrun"]]
    rows.append(["runs that recovered", *(f"{figures['good_runs']} of {kills}" for figures in both), ""])
    for label, name, digits in FIGURES:
        ratio = formatted(summary[f"ratio_{name}"], 3) if f"ratio_{name}" in summary else ""
        rows.append([label, *(formatted(figures[name], digits) for figures in both), ratio])
    rows.append(["different weights at the end", *(str(figures["different_weights"]) for figures in both), ""])
    print()
    print_table(rows)
    ours = summary[TTPRUN]
    print(f"ttprun: lost rank replaced in {ours['replaced']} runs; a standby was ready in {ours['standby_ready']}")
    print("        " + ", ".join(f"{name} {formatted(ours['phases'][name])}" for name in PHASES))


def measure_all(options: argparse.Namespace, root: Path) -> list[Outcome]:
    """All runs, one after the other, with a line on each."""
    chance, outcomes = random.Random(options.seed), list[Outcome]()
    for ranks in options.ranks:
        victims = chance.sample(range(ranks), ranks)
        for kill in range(options.kills):
            alone = measure_alone(root / f"{ranks}-{kill}-alone", script_of(options), options.script_arguments)
            rank, moment = victims[kill % ranks], chance.random()
            for launcher in LAUNCHERS:
                load = round(os.getloadavg()[0], 2)
                outcome = Outcome(launcher, ranks, kill, rank, moment, load, alone.whole_s, alone.script_s)
                measure(outcome, options, root / f"{ranks}-{kill}-{launcher}")
                outcomes.append(outcome)
                total = len(options.ranks) * options.kills * len(LAUNCHERS)
                print(f"[{len(outcomes)}/{total}] {describe(outcome)}", flush=True)
    return outcomes


def main() -> int:
    """Measure and print; returns the exit code: 1 if a run under ttprun has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument(
        "--kills", type=positive, default=5, help="of each launcher, at each number of ranks (default 5)"
    )
    parser.add_argument("--checkpoint-every", type=positive, default=200, help="steps (default 200)")
    parser.add_argument("--framework", choices=list(FRAMEWORKS), help="train with this one's loop")
    parser.add_argument("--standbys", type=int, default=1, help="of ttprun (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are chosen (default 0)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds from a kill to the end of the run")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the runs' logs there; must not exist")
    parser.add_argument("script_arguments", nargs="*", help="additional arguments of train.py, after --")
    options = parser.parse_args()
    before = machine()
    print(headline(before), flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ttprun-bench-") as scratch:
            outcomes = measure_all(options, options.folder or Path(scratch))
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
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
