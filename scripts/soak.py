"""Many random faults, and nothing may differ: a seed draws kinds, ranks and moments; three test scripts are trained.

    python scripts/soak.py --faults 100 --seed 1 --json soak.json
    python scripts/soak.py --device npu        on the simulated NPU of the tests: its own faults and hangs are drawn too
    python scripts/soak.py --moments recovery,together --load 4     a second fault with each, on a busy machine

Each run gets several faults, spread over its steps. MOMENTS says which are drawn; of these `together` and `recovery`
add a second fault to one of another moment: in another rank within milliseconds, or in the replacement or a survivor
while the first is repaired. One rank of each run is spared: its memory and descriptors, and the agent's, are
watched. A run is good if every fault struck and was seen as an incident (or as what its kind comes to), if every
incident was recovered from, if files and output are those of an undisturbed run under torchrun, and if no process is
left. Begin with soak().
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts.soak_faults import DRAWN, MOMENTS, ON_NPU, SECOND, SUBJECTS, Subject, draw_faults  # noqa: E402
from ttprun.chaos.injected_faults import DEVICE_KINDS, ENDING_KINDS, FLIP_KINDS, KINDS, parse_fault  # noqa: E402
from ttprun.chaos.trial.drill import Scenario, compare_twins, misses, run_twin  # noqa: E402
from ttprun.chaos.trial.kills import Injection, pair  # noqa: E402
from ttprun.chaos.trial.twins import Twin  # noqa: E402

LIMIT_S = 300.0  # on a machine that does nothing else
LOOK_EVERY_S = 0.2
BUSY = "import os\nwhile os.getppid() == {0}: sum(range(100_000))"
MIB = 1 << 20
SIMULATED = REPOSITORY / "tests" / "simulated_npu"
HANGS = ("stop", "sleep")
# These change what is computed (and it stays so), or end the run: it cannot come to what an undisturbed one comes to.
NOT_IDENTICAL = ("nan", *FLIP_KINDS, "leave", "agent-kill")


@dataclass
class Outcome:
    """What one run came to.

    recover_s  of each incident that was recovered from, from the first death to its end
    beyond_s   the same less what the script's own set-up took in the replay, in the slowest replacement
    growth     of the agent and of a survivor, from the first recovery to the end: MiB of memory, descriptors
    """

    number: int
    script: str
    faults: list[str]
    injections: list[Injection] = field(default_factory=list)
    recover_s: list[float] = field(default_factory=list)
    beyond_s: list[float] = field(default_factory=list)
    rungs: list[str] = field(default_factory=list)
    steps_lost: int = 0
    is_identical: bool = False
    problems: list[str] = field(default_factory=list)
    growth: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0


class Watch:
    """Looks at the memory and descriptors of a run's agent and of one survivor until the run has ended."""

    def __init__(self, folder: Path, spared: int) -> None:
        self._status = folder / "run" / "status.json"
        self._spared = spared
        # Memory, descriptors, and standbys that were ready: each of them has a line into the agent.
        self._seen: dict[str, list[tuple[float, int, int]]] = {"agent": [], "survivor": []}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def growth(self) -> dict[str, float]:
        """Stop looking; returns what has been added since the first recovery: `agent_mib`, `survivor_fds`, ..."""
        self._stop.set()
        self._thread.join(5.0)
        added: dict[str, float] = {}
        for name, samples in self._seen.items():
            seen = [sample for sample in samples if sample[2] == samples[-1][2]]
            if len(seen) > 1:
                added[f"{name}_mib"] = round((seen[-1][0] - seen[0][0]) / MIB, 2)
                added[f"{name}_fds"] = seen[-1][1] - seen[0][1]
        return added

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                status = json.loads(self._status.read_text())
            except (OSError, ValueError):
                continue
            # Between incidents, so that nothing of a recovery is under way; and not once ranks begin to leave.
            is_calm = status["state"] == "healthy" and all(rank["state"] == "running" for rank in status["ranks"])
            has_recovered = any(incident["outcome"] == "recovered" for incident in status["incidents"])
            if is_calm and has_recovered:
                survivor = next(rank["pid"] for rank in status["ranks"] if rank["rank"] == self._spared)
                self._note("agent", status["agent_pid"], status["standbys"])
                self._note("survivor", survivor, 0)

    def _note(self, name: str, pid: int, standbys: int) -> None:
        try:
            process = psutil.Process(pid)
            self._seen[name].append((process.memory_info().rss, process.num_fds(), standbys))
        except psutil.Error:
            pass


def scenario_of(subject: Subject, options: argparse.Namespace, faults: list[str]) -> Scenario:
    """The drill that one run is."""
    path = [str(SIMULATED)] if options.device == "npu" else []
    return Scenario(
        script=str(REPOSITORY / "tests" / "scripts" / subject.script),
        arguments=list(subject.arguments),
        launch={"nproc_per_node": options.ranks},
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, (*path, str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        },
        ttprun={"standbys": 1, "hang_timeout_s": "auto" if options.hang_timeout is None else options.hang_timeout},
        faults=faults,
        compare=["out/final.pt"],
        limit_s=LIMIT_S * (1 + 2 * options.load),
    )


def run_once(
    number: int, subject: Subject, faults: list[str], options: argparse.Namespace, reference: Twin, folder: Path
) -> Outcome:
    """One disturbed run, judged."""
    hit = {parse_fault(text).rank for text in faults}
    scenario = scenario_of(subject, options, faults)
    watch = Watch(folder, next(rank for rank in range(options.ranks) if rank not in hit))
    twin = run_twin(scenario, folder, "disturbed")
    outcome = Outcome(number, subject.script, faults, growth=watch.growth(), took_s=round(twin.took_s, 2))
    outcome.injections = pair(twin.events)
    incidents = twin.status.incidents if twin.status else ()
    recovered = [event for event in twin.events if event["event"] == "incident" and event["outcome"] == "recovered"]
    outcome.recover_s = [incident["total_s"] for incident in recovered]
    outcome.beyond_s = [incident["total_s"] - setup_s_of(incident, twin.events) for incident in recovered]
    outcome.rungs = [str(incident.rung) for incident in incidents]
    outcome.steps_lost = sum(incident.steps_lost or 0 for incident in incidents)
    # Steps that are taken again are printed again: then the weights alone are compared.
    shown = compare_twins(scenario, twin, reference)
    comparisons = [comparison for comparison in shown if not outcome.steps_lost or comparison.what in scenario.compare]
    outcome.is_identical = all(comparison.is_identical for comparison in comparisons)
    outcome.problems = [
        f"{comparison.what}: {comparison.detail}" for comparison in comparisons if not comparison.is_identical
    ]
    outcome.problems += problems_of(twin, outcome, len(faults), folder)
    return outcome


def setup_s_of(incident: dict[str, Any], events: list[dict[str, Any]]) -> float:
    """What the script's set-up took in the replays of an incident's last attempt; 0 if there was none."""
    replays = (event for event in events if event["event"] == "rank_replayed")
    return max((event["setup_s"] for event in replays if event["generation"] == incident["generation"]), default=0.0)


def problems_of(twin: Twin, outcome: Outcome, ordered: int, folder: Path) -> list[str]:
    """What has not gone well, apart from differences."""
    problems = [twin.problem] if twin.problem else []
    if twin.exit_code:
        problems.append(f"exit code {twin.exit_code}; see {folder}/launcher.log")
    if len(outcome.injections) != ordered:
        problems.append(f"{ordered} faults were ordered, {len(outcome.injections)} are in the log")
    problems += misses(outcome.injections, ("recovered",))
    pids = processes_of(folder / "run")
    if pids:
        problems.append(f"{len(pids)} processes remain: {pids}")
    return problems


def processes_of(run_dir: Path, limit_s: float = 5.0) -> list[int]:
    """Pids of the run that still live after at most `limit_s`."""
    give_up_at_s = time.monotonic() + limit_s
    while True:
        alive = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("_TTPRUN_RUN_DIR") == str(run_dir) and process.status() != "zombie":
                    alive.append(process.pid)
            except psutil.Error:
                continue
        if not alive or time.monotonic() > give_up_at_s:
            return alive
        time.sleep(0.1)


@contextlib.contextmanager
def load(per_core: float) -> Iterator[None]:
    """Keep so many busy processes for each core that this process may use."""
    count = round(per_core * len(os.sched_getaffinity(0)))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY.format(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def soak(options: argparse.Namespace, root: Path, say: Any) -> list[Outcome]:
    """Run until so many faults were ordered, or the time is over; reports each run. Blocks accordingly."""
    drawn = random.Random(options.seed)
    ends_at_s = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")
    references: dict[Subject, Twin] = {}
    outcomes: list[Outcome] = []
    faults_left = options.faults
    while faults_left and time.monotonic() < ends_at_s:
        number = len(outcomes) + 1
        able = [
            subject
            for subject in (ON_NPU if options.device == "npu" else SUBJECTS)
            if any(map(subject.phases_for, options.kinds)) and options.script in (None, subject.script)
        ]
        subject = able[(number - 1) % len(able)]
        faults = draw_faults(
            drawn, subject, min(options.per_run, faults_left), options.ranks, options.kinds, options.moments
        )
        if subject not in references:
            folder = root / f"undisturbed-{len(references)}-{subject.script.removesuffix('.py')}"
            references[subject] = run_twin(scenario_of(subject, options, faults), folder, "torchrun")
        outcome = run_once(number, subject, faults, options, references[subject], root / f"run{number}")
        outcomes.append(outcome)
        faults_left -= len(faults)
        say(
            f"[{options.faults - faults_left}/{options.faults}] run {number}, {subject.script}: {len(faults)} faults, "
            f"{len(outcome.recover_s)} recoveries in {outcome.took_s:.0f} s, "
            + ("identical" if outcome.is_identical else "NOT IDENTICAL")
            + "".join(f"\n    {problem}" for problem in outcome.problems)
            + (f"\n    faults: {' '.join(faults)}" if outcome.problems else "")
        )
    return outcomes


def summarize(outcomes: list[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a soak."""
    injections = [injection for outcome in outcomes for injection in outcome.injections]
    times = sorted(seconds for outcome in outcomes for seconds in outcome.recover_s)
    beyond = sorted(seconds for outcome in outcomes for seconds in outcome.beyond_s)
    detect = sorted(injection.detect_s for injection in injections if injection.detect_s is not None)
    growth = {
        name: max((outcome.growth[name] for outcome in outcomes if name in outcome.growth), default=None)
        for name in ("agent_mib", "agent_fds", "survivor_mib", "survivor_fds")
    }
    return {
        "seed": options.seed,
        "ranks": options.ranks,
        "moments": options.moments,
        "load": options.load,
        "runs": len(outcomes),
        "ordered": sum(len(outcome.faults) for outcome in outcomes),
        "injected": sum(not injection.failure for injection in injections),
        "accounted_for": sum(injection.is_accounted_for for injection in injections),
        "by_kind": dict(Counter(injection.kind for injection in injections)),
        "by_phase": dict(Counter(str(injection.phase) for injection in injections)),
        "rungs": dict(Counter(rung for outcome in outcomes for rung in outcome.rungs)),
        "steps_lost": sum(outcome.steps_lost for outcome in outcomes),
        "recover_s": percentiles(times),
        "beyond_setup_s": percentiles(beyond),
        "detect_s": percentiles(detect),
        "identical_runs": sum(outcome.is_identical for outcome in outcomes),
        "most_growth": growth,
        "problems": [problem for outcome in outcomes for problem in outcome.problems],
    }


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Median, 95th percentile and maximum of sorted values; None if there are none."""
    if not values:
        return None
    at = min(len(values) - 1, int(0.95 * len(values)))
    figures = {"p50": statistics.median(values), "p95": values[at], "max": values[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def show(summary: dict[str, Any]) -> None:
    """The figures as lines."""
    counts = {name: " ".join(f"{key} {count}" for key, count in summary[name].items()) for name in ("by_kind", "rungs")}
    lines = [
        f"faults     {summary['injected']} of {summary['ordered']} injected, {summary['accounted_for']} noticed",
        f"kinds      {counts['by_kind']}",
        f"rungs      {counts['rungs']}; {summary['steps_lost']} steps lost",
    ]
    for name, label in (("recover_s", "recovery"), ("beyond_setup_s", "  of it"), ("detect_s", "detection")):
        figures = summary[name]
        if figures:
            told_s = f"p50 {figures['p50']:.3f} s, p95 {figures['p95']:.3f} s, max {figures['max']:.3f} s"
            lines.append(f"{label:<10} {told_s}" + (" beyond the script's set-up" if label == "  of it" else ""))
    growth = ", ".join(f"{name} {value}" for name, value in summary["most_growth"].items() if value is not None)
    lines.append(f"growth     most in a run, from its first recovery on: {growth or 'not seen'}")
    lines.append(f"identical  {summary['identical_runs']} of {summary['runs']} runs")
    print("\n".join(lines))


def is_good(summary: dict[str, Any]) -> bool:
    """Whether every fault struck and was seen, and nothing differs."""
    is_whole = summary["ordered"] == summary["injected"] == summary["accounted_for"] > 0
    return is_whole and not summary["problems"] and summary["identical_runs"] == summary["runs"]


def read_options(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="faults in all (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same soak (default 1)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each run, from 2 (default 4)")
    parser.add_argument("--per-run", type=int, default=5, help="faults of one run (default 5)")
    parser.add_argument("--minutes", type=float, help="start no run after this many minutes")
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu", help="npu: the simulated one of the tests")
    parser.add_argument("--kinds", help="kinds to draw from (default: those that end a process; on a device all)")
    parser.add_argument(
        "--moments", default=",".join(DRAWN), help=f"of {', '.join(MOMENTS)} (default: {','.join(DRAWN)})"
    )
    parser.add_argument("--load", type=float, default=0.0, help="busy processes for each core, meanwhile (default 0)")
    parser.add_argument("--script", help="only this one of the scripts")
    parser.add_argument("--hang-timeout", type=float, help="ttprun's, in seconds, for kinds that hang (default auto)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="keep the runs there; must not exist")
    options = parser.parse_args(words)
    further = (*DEVICE_KINDS, *HANGS) if options.device == "npu" else ()
    options.kinds = options.kinds.split(",") if options.kinds else [*ENDING_KINDS, *further]
    options.moments = options.moments.split(",")
    if not set(options.moments) <= MOMENTS.keys() or set(options.moments) <= {*SECOND}:
        parser.error(f"--moments needs some of {', '.join(MOMENTS)}, and more than {' and '.join(SECOND)}")
    if options.hang_timeout is None and {*HANGS} & {*options.kinds}:
        options.hang_timeout = 10.0
    unknown = [kind for kind in options.kinds if kind not in KINDS or kind in NOT_IDENTICAL]
    if unknown or min(options.faults, options.ranks - 1, options.per_run) < 1 or options.per_run > 20:
        parser.error(f"kind '{unknown[0]}' is not valid" if unknown else "a number is too small, or --per-run above 20")
    return options


def main(words: list[str] | None = None) -> int:
    """Soak and print; returns the exit code: 1 if anything was not as it must be."""
    options = read_options(words)
    with tempfile.TemporaryDirectory(prefix="ttprun-soak-") as scratch:
        root = options.folder or Path(scratch)
        with load(options.load):
            outcomes = soak(options, root.absolute(), lambda text: print(text, flush=True))
    summary = summarize(outcomes, options)
    show(summary)
    if options.json:
        options.json.write_text(json.dumps(summary | {"outcomes": [asdict(outcome) for outcome in outcomes]}, indent=1))
    print("good" if is_good(summary) else "FAILED")
    return 0 if is_good(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
