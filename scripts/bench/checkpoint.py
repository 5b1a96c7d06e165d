"""What it costs to keep a job's state: dying gasps, snapshots, resuming; plain torch; the bare machine.

    python scripts/bench/checkpoint.py --mib 64 --rounds 1          # a try, in two minutes
    python scripts/bench/checkpoint.py --json checkpoint.json       # 1 GiB of state on 2 ranks, three rounds

Each round does these in turn, in folders that are removed again:
    disk    dd conv=fsync writes as many bytes to the same directory
    never   ttprun --snapshot-every never; after the last step it is ended by SIGTERM: a dying gasp. Then dd once more
    every   the same command with snapshots every 20 steps, the files dropped from the page cache before. It resumes
            from the dying gasp, so this is the time to resume; then its steps are compared with those of `never`; at
            the end comes `ttprun checkpoint now`. Two steps before each snapshot the script itself makes a plain copy
            of as many bytes of its state, all ranks at once, into shared memory that is kept as a snapshot's is (two
            places in turn, written 40 steps ago): by how much this makes its step longer is what a snapshot's step
            is compared with
    torch   torchrun; the script itself calls torch.save every 20 steps, and loads the file again at the end, not cached
    async   torchrun; the script calls torch.distributed.checkpoint.async_save every 20 steps

The first two saves of each kind take their memory from the system, later ones find it there: only these are reported,
but for `fresh`. Ratios are taken within a round; the table shows medians of all rounds. Begin with measure_round().
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from measured import evict
from runs import (
    REPOSITORY,
    TORCHRUN,
    TTPRUN,
    BenchmarkError,
    Run,
    environment,
    formatted,
    headline,
    machine,
    positive,
    print_table,
    spread,
)
from steplog import LOOK_AGAIN_S, START_LIMIT_S, read_log, read_logs

SCRIPT = Path(__file__).resolve().parent / "big_state.py"
MIB = 1 << 20
EVERY = 20  # steps from one save to the next
FRESH = 2  # saves whose memory is new
SAVES = 8
COPY_AT = 18  # steps behind a snapshot: the disk is done with it by then
WARM_UP = 5  # steps that are left out
LIMIT_S = 600.0
Figures = dict[str, float]

# Label, name, factor, digits. Names are those of the functions below.
TABLE = (
    ("disk: dd conv=fsync, MiB/s", "dd_bytes_s", 1 / MIB, 0),
    ("dying gasp, from the order to the ranks: MiB/s", "gasp_bytes_s", 1 / MIB, 0),
    ("  share of dd (aim: 0.8 or more)", "gasp_share", 1, 2),
    ("  with the stopping of the ranks, from SIGTERM on: share of dd", "gasp_whole_share", 1, 2),
    ("  seconds from SIGTERM", "gasp_whole_s", 1, 2),
    ("`checkpoint now`: share of dd", "asked_share", 1, 2),
    ("  seconds from the command's arrival", "asked_whole_s", 1, 2),
    ("median step without snapshots, ms", "never_step_s", 1e3, 1),
    ("plain copy of a rank's share by the script: the step is longer by, ms", "copy_stall_s", 1e3, 1),
    ("snapshot: the step is longer by, ms", "every_stall_s", 1e3, 1),
    ("  in such copies (aim: 1 or less)", "every_stall_in_copies", 1, 2),
    ("  share of wall time, one per 20 steps (aim: 0.05 or less)", "every_stall_share", 1, 4),
    ("  with what the disk costs in the background: share of wall time", "every_wall_share", 1, 4),
    ("  the first two, ms", "every_fresh_stall_s", 1e3, 1),
    ("  seconds until it is on the disk", "every_durable_s", 1, 2),
    ("torch.save in rank 0: the step is longer by, ms", "torch_stall_s", 1e3, 1),
    ("  share of wall time, one per 20 steps", "torch_stall_share", 1, 4),
    ("  seconds until it is on the disk", "torch_durable_s", 1, 2),
    ("DCP async_save: the step is longer by, ms", "async_stall_s", 1e3, 1),
    ("  share of wall time, one per 20 steps", "async_stall_share", 1, 4),
    ("  with what runs in the background: share of wall time", "async_wall_share", 1, 4),
    ("  seconds until it is on the disk", "async_durable_s", 1, 2),
    ("resume: the launch reads and hashes, s", "check_s", 1, 2),
    ("  the ranks load, s", "transfer_s", 1, 2),
    ("  both", "resume_s", 1, 2),
    ("torch.load of as many bytes, s", "torch_load_s", 1, 2),
    ("  with load_state_dict, s", "torch_resume_s", 1, 2),
    ("resume / torch.load", "resume_per_load", 1, 2),
    ("resume / torch.load with load_state_dict", "resume_per_torch_resume", 1, 2),
)


def measure_round(options: argparse.Namespace, folder: Path, report: Callable[[str], None]) -> Figures:
    """One round. Raises BenchmarkError if a run does not do what it should."""
    figures: Figures = {}
    save_dir = folder / "save"
    before = dd_bytes_s(options.mib, folder)
    figures |= measure_never(options, folder / "never", save_dir)
    figures["dd_bytes_s"] = mean([before, dd_bytes_s(options.mib, folder)])
    report(f"dying gasp of {figures['size_bytes'] / MIB:.0f} MiB in {figures['gasp_s']:.2f} s")
    for path in save_dir.glob("*/*"):
        evict(path)
    figures |= measure_every(options, folder / "every", save_dir)
    report(
        f"resumed in {figures['check_s'] + figures['transfer_s']:.2f} s, "
        f"stalls {figures['every_stall_s'] * 1e3:.0f} ms, those of a plain copy {figures['copy_stall_s'] * 1e3:.0f} ms"
    )
    for kind in ("torch", "async"):
        figures |= measure_saving(kind, options, folder / kind)
        report(f"{kind}: stalls {figures[f'{kind}_stall_s'] * 1e3:.0f} ms")
    return figures | ratios_of(figures)


def ratios_of(figures: Figures) -> Figures:
    """What the figures of one round are in terms of each other."""
    resume_s = figures["check_s"] + figures["transfer_s"]
    ratios = {
        "resume_s": resume_s,
        "resume_per_load": resume_s / figures["torch_load_s"],
        "resume_per_torch_resume": resume_s / figures["torch_resume_s"],
        "every_stall_in_copies": figures["every_stall_s"] / figures["copy_stall_s"],
    }
    for name in ("gasp", "asked"):
        ratios[f"{name}_bytes_s"] = figures["size_bytes"] / figures[f"{name}_s"]
        ratios[f"{name}_share"] = ratios[f"{name}_bytes_s"] / figures["dd_bytes_s"]
        ratios[f"{name}_whole_share"] = figures["size_bytes"] / figures[f"{name}_whole_s"] / figures["dd_bytes_s"]
    for name in ("every", "torch", "async"):
        ratios[f"{name}_stall_share"] = figures[f"{name}_stall_s"] / (EVERY * figures[f"{name}_step_s"])
        ratios[f"{name}_wall_share"] = figures[f"{name}_mean_step_s"] / figures["never_mean_step_s"] - 1
    return ratios


def measure_never(options: argparse.Namespace, folder: Path, save_dir: Path) -> Figures:
    """Steps without snapshots, and a dying gasp at their end."""
    with start_ttprun(options, folder, save_dir, "never", steps=10**6) as run:
        wait_for_steps(run, steps := EVERY * 3)
        steps_s = step_times(run)
        at_s = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        if run.process.wait(LIMIT_S) != 143:
            raise BenchmarkError(f"no dying gasp: exit code {run.process.returncode}; {run.last_words()}")
    written = event(run, "checkpoint_written")
    undisturbed = steps_of(steps_s, set(range(WARM_UP, steps)).difference(copies_in(steps_s)))
    return {
        "size_bytes": written["bytes"],
        "gasp_s": written["took_s"],
        "gasp_whole_s": written["at_s"] - at_s,
        "never_step_s": median(undisturbed),
        "never_mean_step_s": mean(undisturbed),
    }


def measure_every(options: argparse.Namespace, folder: Path, save_dir: Path) -> Figures:
    """The resume, steps with snapshots, and a checkpoint that is asked for at their end."""
    with start_ttprun(options, folder, save_dir, f"{EVERY}steps", steps=10**6) as run:
        first = event(run, "checkpoint_found", wait=True)["boundary"]
        wait_for_steps(run, first + EVERY * (SAVES + 1))
        steps_s = step_times(run)
        at_s = time.monotonic()
        ask_for_checkpoint(run)
        asked = event(run, "checkpoint_written", wait=True, cause="asked")
        snapshots = [taken["boundary"] for taken in events(run) if taken["event"] == "snapshot_taken"]
        written = [saved["took_s"] for saved in events(run) if saved.get("cause") == "periodic"]
        (resume,) = [ended for ended in events(run) if ended["event"] == "incident" and ended["outcome"] == "recovered"]
        run.process.kill()  # the ranks go with it
    copies = copies_in(steps_s)
    return {
        "check_s": event(run, "checkpoint_found")["took_s"],
        "transfer_s": resume["transfer_s"],
        "incident_s": resume["total_s"],
        "asked_s": asked["took_s"],
        "asked_whole_s": asked["at_s"] - at_s,
        "every_durable_s": median(written),
        **stalls("every", steps_s, snapshots, first, others=copies),
        **stalls("copy", steps_s, copies, first, others=snapshots),
    }


def measure_saving(kind: str, options: argparse.Namespace, folder: Path) -> Figures:
    """Steps of a script that saves itself."""
    folder.mkdir()
    arguments = [f"--mib={options.mib}", f"--steps={EVERY * (SAVES + 1)}", f"--save={kind}", f"--save-every={EVERY}"]
    arguments += ["--step-logs={folder}/logs", "--report={folder}/reports", "--save-to={folder}"]
    with Run(TORCHRUN, options.ranks, folder, arguments=arguments, script=SCRIPT) as run:
        run.finish(LIMIT_S)
        reports = [json.loads((run.reports / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]
    # A save comes behind its step's line in the log, so it lengthens the step that follows.
    figures = stalls(kind, step_times(run), [EVERY * number + 1 for number in range(1, SAVES + 1)], 0)
    figures[f"{kind}_durable_s"] = median(reports[0]["durable_s"][FRESH:])
    for name in ("torch_load_s", "torch_resume_s"):
        if name in reports[0]:
            figures[name] = max(report[name] for report in reports)
    return figures


def stalls(name: str, steps_s: dict[int, float], saves: list[int], first: int, others: Iterable[int] = ()) -> Figures:
    """By how much steps with a save are longer, and what steps take.

    steps_s   by number, seconds
    saves     numbers of the steps that are longer
    first     the run began behind this step
    others    steps that are longer for another reason: left out
    """
    saves = [step for step in saves if step in steps_s]
    if len(saves) <= FRESH:
        raise BenchmarkError(f"'{name}' has saved {len(saves)} times only, in {len(steps_s)} steps")
    excluded = set(saves) | set(others)
    rest = set(range(saves[FRESH - 1] + 1, max(steps_s) + 1)).difference(others)
    without = median(seconds for step, seconds in steps_s.items() if step not in excluded and step > first + WARM_UP)
    return {
        f"{name}_step_s": without,
        f"{name}_mean_step_s": mean(steps_of(steps_s, rest)),
        f"{name}_stall_s": median(steps_s[step] - without for step in saves[FRESH:]),
        f"{name}_fresh_stall_s": mean(steps_s[step] - without for step in saves[:FRESH]),
    }


def start_ttprun(options: argparse.Namespace, folder: Path, save_dir: Path, every: str, steps: int) -> Run:
    """ttprun without a standby, whose start would take a core from the first steps."""
    ours = ["--snapshot-every", every, "--save-dir", str(save_dir), "--standbys", "0"]
    arguments = [f"--mib={options.mib}", f"--steps={steps}", "--step-logs=logs"]
    arguments += [f"--copy-every={EVERY}", f"--copy-at={COPY_AT}"]
    return Run(TTPRUN, options.ranks, folder, ours, arguments, SCRIPT)


def wait_for_steps(run: Run, step: int) -> None:
    """Block until a step is done; each step on the way has START_LIMIT_S. Raises BenchmarkError."""
    done, give_up_at_s = -1, time.monotonic() + START_LIMIT_S
    while done < step:
        newest = max((line.step or 0 for line in read_log(run, 0)), default=0)
        if newest > done:
            done, give_up_at_s = newest, time.monotonic() + START_LIMIT_S
        if run.process.poll() is not None or time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"it came to step {done} only, not to {step}; {run.last_words()}")
        time.sleep(LOOK_AGAIN_S)


def copies_in(steps_s: dict[int, float]) -> list[int]:
    """Numbers of the steps in which the script has made a plain copy."""
    return [step for step in sorted(steps_s) if step % EVERY == COPY_AT]


def step_times(run: Run) -> dict[int, float]:
    """Step -> its seconds, of the rank that took longest; from the end of the step before."""
    times_s: dict[int, float] = {}
    for log in read_logs(run):
        lines = [line for line in log if line.step is not None]
        for before, after in pairwise(lines):
            assert after.step is not None
            if before.pid == after.pid:
                times_s[after.step] = max(times_s.get(after.step, 0.0), after.at_s - before.at_s)
    return times_s


def steps_of(steps_s: dict[int, float], numbers: Iterable[int]) -> list[float]:
    """Seconds of those of the steps that are known."""
    return [steps_s[number] for number in numbers if number in steps_s]


def events(run: Run) -> list[dict[str, Any]]:
    """The event log so far."""
    path = run.run_dir / "events.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def event(run: Run, name: str, wait: bool = False, **fields: object) -> dict[str, Any]:
    """The first event of a kind. Raises BenchmarkError if there is none, with `wait` when the run ends or LIMIT_S."""
    give_up_at_s = time.monotonic() + (LIMIT_S if wait else 0.0)
    wanted = {"event": name} | fields
    while True:
        is_over = time.monotonic() >= give_up_at_s or run.process.poll() is not None
        for candidate in events(run):
            if wanted.items() <= candidate.items():
                return candidate
        if is_over:
            raise BenchmarkError(f"no event {wanted}; {run.last_words()}")
        time.sleep(0.02)


def ask_for_checkpoint(run: Run) -> None:
    """`ttprun checkpoint now`. Raises BenchmarkError."""
    command = [sys.executable, "-m", "ttprun", "checkpoint", "now", "--run", str(run.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(TTPRUN), cwd=REPOSITORY, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"`ttprun checkpoint now`: {done.stderr.strip()}")


def dd_bytes_s(mib: int, folder: Path) -> float:
    """Bytes a second that dd writes to a new file, the disk's own cache flushed."""
    path = folder / "dd"
    began_s = time.monotonic()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mib}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    took_s = time.monotonic() - began_s
    path.unlink()
    return mib * MIB / took_s


def show(rounds: list[Figures]) -> None:
    """All rounds as a table."""
    rows = [["", "median (min-max)"]]
    for label, name, factor, digits in TABLE:
        quartiles = spread(figures.get(name) for figures in rounds)
        rows.append([label, formatted(quartiles and {key: value * factor for key, value in quartiles.items()}, digits)])
    print()
    print_table(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=positive, default=1024, help="state of each rank, the same in all (default 1024)")
    parser.add_argument("--ranks", type=positive, default=2, help="default 2")
    parser.add_argument("--rounds", type=positive, default=3, help="default 3, of about three minutes each")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="existing directory on the disk to measure; default: that of /tmp")
    return parser.parse_args()


def main() -> int:
    """Measure and print; returns the exit code: 1 if a run has failed."""
    options = parse_arguments()
    before = machine()
    print(headline(before), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contexts end what was begun
    rounds: list[Figures] = []
    began_s = time.monotonic()
    try:
        for number in range(1, options.rounds + 1):

            def report(text: str, number: int = number) -> None:
                print(f"[{number}/{options.rounds}, {time.monotonic() - began_s:.0f} s] {text}", flush=True)

            with tempfile.TemporaryDirectory(prefix="ttprun-bench-", dir=options.folder) as scratch:
                load = os.getloadavg()[0]
                rounds.append(measure_round(options, Path(scratch), report) | {"load": load})
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    show(rounds)
    print(f"\nat the end: {headline(machine())}")
    if options.json:
        options.json.write_text(json.dumps({"machine": before, "mib": options.mib, "rounds": rounds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
