"""What a killed rank, a joining node and an undisturbed step cost on two nodes: network namespaces, a launcher in each.

    PYTHONPATH=. python scripts/bench/nodes.py --kills 3 --json nodes.json

The same script and the same namespaces for torchrun (--max-restarts 3, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) and
ttprun, which take turns. A kill is a SIGKILL between two checkpoints of the script. Needs root. Begin with `kill_one`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs import LAUNCHERS, TTPRUN, BenchmarkError, Run, formatted, headline, machine, positive, print_table, spread
from steplog import read_log, read_logs, wait_for_step
from turns import wait_for_standby

from tests.nodes import Nodes, why_none

NODES = 2
KILLED_AFTER, EVERY = 25, 50  # steps: from a checkpoint to the kill; from one checkpoint to the next
LIMIT_S = 120.0
BEFORE_WATCHED_S = 0.02


@contextlib.contextmanager
def job(launcher: str, nodes: Nodes, ranks: int, folder: Path, *arguments: str) -> Iterator[list[Run]]:
    """A job of so many ranks on each node; its first run has the logs and reports of all."""
    with contextlib.ExitStack() as stack:
        runs: list[Run] = []
        shared = folder / "0"
        for number in range(NODES):
            options = [*nodes.rendezvous(number), "--max-restarts", "3"]
            logs = ["--step-logs", str(shared / "logs"), "--report", str(shared / "reports")]
            words = [*logs, *arguments]
            run = Run(launcher, ranks, folder / str(number), options, words, within=nodes.inside(number))
            runs.append(stack.enter_context(run))
        runs[0].ranks = ranks * NODES
        yield runs


def kill_one(launcher: str, nodes: Nodes, ranks: int, folder: Path, rank: int, width: int) -> dict[str, Any]:
    """Kill a rank: seconds until all ranks have taken another step, and until they are beyond where they were."""
    saves = ["--checkpoint", str(folder / "last.pt"), "--checkpoint-every", str(EVERY)]
    with job(launcher, nodes, ranks, folder, *saves, "--steps", "1000000", "--width", str(width)) as runs:
        wait_for_training(launcher, runs)
        newest = max(line.step or 0 for line in read_logs(runs[0])[rank])
        wait_for_step(runs[0], (max(newest, EVERY) // EVERY + 1) * EVERY + KILLED_AFTER, rank)
        log = read_logs(runs[0])[rank]
        reached = max(line.step for line in log if line.step is not None)
        killed_at_s = time.time()
        os.kill(log[-1].pid, signal.SIGKILL)
        give_up_at_s = time.monotonic() + LIMIT_S
        while True:
            logs = [[line for line in log if line.step is not None] for log in read_logs(runs[0])]
            # Those that had completed their step already note it within a moment of the kill.
            since = [[line for line in log if line.at_s > killed_at_s + BEFORE_WATCHED_S] for log in logs]
            beyond = [[line.at_s for line in lines if (line.step or 0) > reached + 1] for lines in since]
            if all(beyond):
                break
            if time.monotonic() > give_up_at_s or any(run.process.poll() is not None for run in runs):
                raise BenchmarkError(f"it did not recover; {runs[0].last_words()}")
            time.sleep(0.05)
        again = Counter(line.step for lines in logs for line in lines)
        return {
            "next_step_s": max(min(line.at_s for line in lines) for lines in since) - killed_at_s,
            "progress_s": max(min(times_s) for times_s in beyond) - killed_at_s,
            "run_again": sum(times > ranks * NODES for times in again.values()),
        }


def join_one(nodes: Nodes, ranks: int, folder: Path, width: int) -> dict[str, Any]:
    """A second node joins a job that runs on one: seconds without a step, and those of them beyond the set-up.

    The set-up is the script's time from its top to its first optimizer step, in the slowest rank.
    """
    shared = folder / "0"
    logs = ["--step-logs", str(shared / "logs"), "--report", str(shared / "reports")]
    words = [*logs, "--steps", "1000000", "--width", str(width)]
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Run:
            options = [*nodes.rendezvous(number, f"1:{NODES}"), "--elastic", "--save-dir", str(folder / "save")]
            run = Run(TTPRUN, ranks, folder / str(number), options, words, within=nodes.inside(number))
            return stack.enter_context(run)

        first = start(0)
        wait_for_training(TTPRUN, [first])
        start(1)
        give_up_at_s = time.monotonic() + LIMIT_S
        while joined_after(first) is None:
            if time.monotonic() > give_up_at_s or first.process.poll() is not None:
                raise BenchmarkError(f"no node joined; {first.last_words()}")
            time.sleep(0.05)
        pause_s = joined_after(first)
        assert pause_s is not None
        events = [json.loads(line) for line in (first.run_dir / "events.jsonl").read_text().splitlines()]
    setup_s = max(event["setup_s"] for event in events if event["event"] == "rank_replayed")
    lost = [event["steps_lost"] for event in events if event["event"] == "incident" and event["outcome"] != "open"]
    return {"pause_s": pause_s, "beyond_setup_s": pause_s - setup_s, "run_again": sum(lost)}


def joined_after(run: Run) -> float | None:
    """Seconds from the last step of rank 0's first process to the next one; None before that.

    The first step of the new process belongs to its set-up: it is trained on any data, and undone.
    """
    log = [line for line in read_log(run, 0) if line.step is not None]
    old = [line for line in log if line.pid == log[0].pid]
    beyond = [line for line in log if line.pid != log[0].pid and (line.step or 0) > (old[-1].step or 0)]
    return beyond[0].at_s - old[-1].at_s if beyond else None


def time_steps(launcher: str, nodes: Nodes, ranks: int, folder: Path, steps: int, width: int) -> float:
    """Median seconds of a step of an undisturbed job, in the slowest rank, once the standbys are prepared."""
    with job(launcher, nodes, ranks, folder, "--steps", "1000000", "--width", str(width)) as runs:
        wait_for_training(launcher, runs)
        begin = max(line.step or 0 for line in read_logs(runs[0])[0]) + 1
        wait_for_step(runs[0], begin + steps, 0)
        logs = [[line.at_s for line in log if (line.step or 0) >= begin] for log in read_logs(runs[0])]
        return max(statistics.median(after - before for before, after in pairwise(ends)) for ends in logs)


def wait_for_training(launcher: str, runs: list[Run]) -> None:
    """Wait for the first step, and until no standby is being prepared: that takes a processor for seconds."""
    wait_for_step(runs[0], 1, 0)
    for run in runs if launcher == TTPRUN else ():
        wait_for_standby(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2, help="of each node; all nodes share this machine's cores")
    parser.add_argument("--kills", type=positive, default=3)
    parser.add_argument("--joins", type=positive, default=3, help="of a second node (--elastic)")
    parser.add_argument("--runs", type=positive, default=3, help="undisturbed runs of each launcher")
    parser.add_argument("--steps", type=positive, default=200, help="of an undisturbed run")
    parser.add_argument("--width", type=positive, default=512, help="of the model; sets the time of a step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why_none():
        print(why_none(), file=sys.stderr)
        return 1
    results: dict[str, Any] = {
        "machine": machine(),
        "ranks": options.ranks,
        "kills": [],
        "joins": [],
        "step_s": {name: [] for name in LAUNCHERS},
    }
    with tempfile.TemporaryDirectory() as root, Nodes(NODES) as nodes:
        for turn in range(options.joins):
            outcome = join_one(nodes, options.ranks, Path(root) / f"join-{turn}", options.width)
            results["joins"].append(outcome)
            print(f"{TTPRUN}: a node joined: {outcome}", flush=True)
        for turn in range(max(options.kills, options.runs)):
            for launcher in LAUNCHERS:
                folder = Path(root) / f"{launcher}-{turn}"
                if turn < options.kills:
                    rank = (2 * turn + 1) % (options.ranks * NODES)
                    outcome = kill_one(launcher, nodes, options.ranks, folder / "kill", rank, options.width)
                    results["kills"].append({"launcher": launcher, "rank": rank} | outcome)
                    print(f"{launcher}: rank {rank} killed: {outcome}", flush=True)
                if turn < options.runs:
                    step_s = time_steps(launcher, nodes, options.ranks, folder / "steps", options.steps, options.width)
                    results["step_s"][launcher].append(step_s)
                    print(f"{launcher}: a step takes {step_s * 1e3:.1f} ms", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    show(results)
    return 0


def show(results: dict[str, Any]) -> None:
    """Print what was measured."""
    print(headline(results["machine"]), f"{NODES} nodes of {results['ranks']} ranks", sep=", ")
    rows = [["median (least-greatest)", *LAUNCHERS]]
    names = {"next_step_s": "kill to next step on all ranks, s", "progress_s": "kill to first new step, s"}
    for name, text in {**names, "run_again": "steps run again by all ranks"}.items():
        of = {
            launcher: [kill[name] for kill in results["kills"] if kill["launcher"] == launcher]
            for launcher in LAUNCHERS
        }
        rows.append([text, *(formatted(spread(of[launcher])) for launcher in LAUNCHERS)])
    joins = {"pause_s": "join of a node: pause, s", "beyond_setup_s": "join of a node: beyond the set-up, s"}
    for name, text in joins.items():
        of_ours = [
            formatted(spread(join[name] for join in results["joins"])) if launcher == TTPRUN else "-"
            for launcher in LAUNCHERS
        ]
        rows.append([text, *of_ours])
    steps = results["step_s"]
    rows.append(["a step, ms", *(formatted(spread(s * 1e3 for s in steps[launcher]), 1) for launcher in LAUNCHERS)])
    print_table(rows)
    ratios = [ours / theirs for theirs, ours in zip(*(steps[launcher] for launcher in LAUNCHERS), strict=True)]
    print(f"overhead of a step, {TTPRUN} to torchrun: {formatted(spread(ratios), 3)}")


if __name__ == "__main__":
    sys.exit(main())
