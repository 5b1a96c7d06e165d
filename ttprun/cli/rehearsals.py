"""`ttprun check`, `drill` and `demo`: a script runs with faults and without, and both runs are compared."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttprun.chaos.trial.drill import Scenario, command_of, read_scenario
from ttprun.chaos.trial.twins import place_for_runs
from ttprun.cli.terminal import new_table, open_console
from ttprun.config_sources import shipped
from ttprun.errors import ConfigError, counted
from ttprun.observe.run_directory import RunDirectory, Trace, read_trace

if TYPE_CHECKING:
    from ttprun.chaos.trial.check import CheckReport, CheckTarget
    from ttprun.chaos.trial.drill import DrillReport
    from ttprun.chaos.trial.kills import Injection, KillOutcome


def drill(
    scenario: Annotated[str, typer.Argument(help="YAML file that says what to run and which faults to cause.")],
    folder: Annotated[str | None, typer.Option(help="Keep both runs there; default: they are removed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run; do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report in JSON, for programs.")] = False,
) -> int:
    """Rehearse: run a script under faults and undisturbed, and say whether both ended identically.

    A scenario needs two keys; configs/drills/ holds whole ones to copy:

    script: train.py

    faults: ["kill:rank=1,step=20,phase=backward"]

    Also useful: arguments, launch: {nproc_per_node: 4}, compare: [out/final.pt], rungs: [replace].

    Each twin runs in a folder of its own; write {folder} in arguments where the script must know it. Files of
    torch.save are compared by their tensors, others by their bytes, and each rank's output line by line.

    Exit code: 0 identical, 1 not identical or not recovered, 2 the scenario cannot be used.
    """
    wanted = read_scenario(scenario)
    with place_for_runs(folder, "ttprun-drill-") as place:
        if dry_run:
            show_plan(wanted, place, as_json)
            return 0
        return run_drill(wanted, place, as_json, is_kept=folder is not None)


def demo() -> int:
    """See it: a small GPT trains on three ranks of this machine, one is killed, and the weights are torchrun's.

    A minute or two, without a GPU; nothing is left behind. It is the drill configs/drills/one_kill.yaml.

    Exit code: 0 the weights are identical, 1 they are not.
    """
    wanted = read_scenario(str(shipped() / "drills" / "one_kill.yaml"))
    with place_for_runs(None, "ttprun-demo-") as place:
        return run_drill(wanted, place, as_json=False, is_kept=True, names_hashes=True)


def diff(
    run_a: Annotated[Path, typer.Argument(help="Trace of a run (--trace FILE), or the directory of that run.")],
    run_b: Annotated[Path, typer.Argument(help="The same of another run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result in JSON, for programs.")] = False,
) -> int:
    """Two runs should have been the same. Find the first step in which they are not, and what was different there.

    ttprun --trace a.trace --nproc-per-node 2 train.py

    ttprun --trace b.trace --nproc-per-node 2 train.py

    ttprun diff a.trace b.trace

    Each step of each rank leaves digests of its batch, random numbers, loss, gradients and weights, in the order in
    which they come to be. The first one that differs says where to look: "step 40: other samples in the batch: the
    sampler", "step 412, rank 1: same loss, other gradient of layers.3: kernel or device". More: ttprun guide compare.

    Exit code: 0 the same, 1 different, 2 a trace cannot be read.
    """
    lines, is_same = compare_traces(read_trace(run_a), read_trace(run_b))
    print(json.dumps({"same": is_same, "lines": lines}) if as_json else "\n".join(lines))
    return 0 if is_same else 1


def replay(
    run: Annotated[
        str | None,
        typer.Argument(help="Id or directory of a run with --keep-steps, or a step that was saved; default: newest."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which rank; default: the one that is kept, if it is one.")] = None,
    step: Annotated[str, typer.Option(help="Number of the step, or 'last'.")] = "last",
    debugs: Annotated[bool, typer.Option("--pdb", help="Stop in Python's debugger at the step's first line.")] = False,
    at: Annotated[str, typer.Option(help="'nan': stop in the debugger where a variable holds the first NaN.")] = "",
    run_code: Annotated[
        str | None, typer.Option(help="Python file that is run at the step's first line, with the variables there.")
    ] = None,
    save_in: Annotated[
        str | None, typer.Option("--save", help="Copy the step to this new folder, and do no more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result in JSON, for programs.")] = False,
) -> int:
    """Take a step of one rank again, in one process, without the other ranks.

    ttprun --keep-steps 1 --nproc-per-node 2 train.py

    ttprun replay --rank 1

    The process begins with the rank's weights, variables, random states and data positions before the step, and its
    collectives give what they gave in the run. Compared with the run: batches, losses, what the rank puts into each
    collective, weights after the step, and the exception that ended it. It writes no files. More: ttprun guide compare.

    ttprun replay --rank 1 --pdb

    Exit code: 0 the same, 1 different, 2 the step cannot be taken again.
    """
    from ttprun.agent.node.step_again import chosen, save, take_again

    if at not in ("", "nan") or (run_code is not None and not Path(run_code).is_file()):
        raise ConfigError("--at takes 'nan', and --run-code a Python file", "see ttprun replay --help")
    asked = {"--pdb": debugs, "--at": at, "--run-code": run_code, "--save": save_in}
    together = [option for option, value in asked.items() if value]
    if len(together) > 1 and together != ["--pdb", "--at"]:
        raise ConfigError(f"{' and '.join(together)} cannot be combined", "give one of them")
    saved = Path(run or "none")
    folder = saved if (saved / "step.msgpack").is_file() else chosen(RunDirectory.find(run).path, rank, step)
    if save_in is not None:
        save(folder, Path(save_in))
        print(f"saved; on a machine that has the script at the same path: ttprun replay {save_in}")
        return 0
    again = take_again(folder, at or ("pdb" if debugs else str(Path(run_code or "").absolute()) if run_code else ""))
    lines = [f"{folder.name}: {', '.join(again.equal) or 'nothing'} equal"]
    lines += [f"{'first difference' if not at else 'then'}: {what}" for at, what in enumerate(again.differing)]
    lines += [f"cannot be taken again: {again.why_not}"] if again.why_not else []
    print(json.dumps(asdict(again)) if as_json else "\n".join(lines))
    return 1 if again.differing else 2 if again.why_not else 0


def compare_traces(first: Trace, second: Trace) -> tuple[list[str], bool]:
    """Sentences about the first difference of two traces, and whether there is none."""
    from ttprun.chaos.trial.compare import aligned, differing_samples, differing_settings, trace_differences

    other, by = aligned(first, second)
    lines = [f"step 0 of the second run has the weights of step {by} of the first: compared from there"] if by else []
    ranks, step = min(first.steps), max(first.steps[min(first.steps)])
    if len(first.steps) != len(other.steps):
        at = differing_samples(first, other)
        lines.append(
            f"{counted(len(other.steps), 'rank')} instead of {len(first.steps)}: losses and gradients cannot be equal, "
            "and only what the ranks have together is compared"
        )
        lines.append(f"step {at}: other samples in the batches" if at is not None else "the same samples in each step")
        return lines + differing_settings(first, other, ranks, step), at is None
    differences = trace_differences(first, other)
    if not differences:
        both = first.steps[ranks], other.steps.get(ranks, {})
        common = sum("n" in both[0][at] and "n" in both[1][at] for at in both[0].keys() & both[1].keys())
        lines.append(
            f"no difference in {counted(common, 'step')} of {counted(len(first.steps), 'rank')}"
            if common
            else "no step in common"
        )
        return lines + [f"without effect: {text}" for text in differing_settings(first, other, ranks, step)], common > 0
    step, link = differences[0].step, differences[0].link
    same = [each for each in differences if (each.step, each.link) == (step, link)]
    is_in_all = len(same) == len(first.steps)
    which = "" if is_in_all else f", rank{'s'[: len(same) > 1]} {', '.join(str(each.rank) for each in same)}"
    return [*lines, f"step {step}{which}: {same[0].why}"], False


def run_drill(scenario: Scenario, place: Path, as_json: bool, is_kept: bool, names_hashes: bool = False) -> int:
    """Run the drill and report; returns the exit code: 0 if it has passed, else 1.

    place         an empty or new folder for both runs
    as_json       the report as one line of JSON
    is_kept       the folder stays, so how to keep it need not be said
    names_hashes  show the last line of rank 0 in both runs, too: the hash of the weights
    """
    from ttprun.chaos.trial.drill import rehearse

    shown = rehearse(scenario, place, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(shown.to_json()))
    else:
        console = open_console()
        console.print(draw_drill(console, shown))
        for name, twin in (("torchrun", shown.undisturbed), ("ttprun", shown.disturbed)) if names_hashes else ():
            print(f"{name:>8}: {(twin.output.get(0) or ['-'])[-1]}")
        if not shown.has_passed and not is_kept:
            print("ttprun: run it again with --folder DIR to keep both runs", file=sys.stderr)
    return 0 if shown.has_passed else 1


def show_plan(scenario: Scenario, place: Path, as_json: bool) -> None:
    """Print both commands and the faults, and what is compared.

    place     where both runs would be
    as_json   one line of JSON
    """
    command = shlex.join(command_of(scenario, place / "disturbed"))
    if as_json:
        print(json.dumps({"dry_run": True, "command": command} | scenario.model_dump()))
        return
    ranks = shlex.join([f"--{name}={value}" for name, value in scenario.launch.items()])
    print(f"{scenario.twin} {ranks} {shlex.join(command_of(scenario, place / 'undisturbed'))}")
    print(f"ttprun {ranks} --allow-faults {' '.join(f'--fault {fault}' for fault in scenario.faults)} {command}")
    compared = [*scenario.compare, *(["each rank's output"] if scenario.compare_output else [])]
    print(f"then compare: {', '.join(compared)}")


def draw_drill(console: Console, shown: DrillReport) -> RenderableType:
    """The whole report: faults, comparisons, problems, the verdict."""
    parts: list[RenderableType] = [draw_injections(console, shown.injections)]
    table = new_table(console, "compared", "by", "result", "")
    for comparison in shown.comparisons:
        table.add_row(
            comparison.what, comparison.how, "identical" if comparison.is_identical else "DIFFERENT", comparison.detail
        )
    parts += [Text(), table]
    parts += [Text(f"problem: {problem}", style="yellow") for problem in shown.problems]
    verdict = "identical" if shown.is_identical else "NOT IDENTICAL"
    if shown.is_identical and shown.problems:
        verdict += ", with problems"
    took = f"{shown.disturbed.took_s:.1f} s with faults, {shown.undisturbed.took_s:.1f} s without"
    parts.append(Text(f"{verdict} · {took}", style="bold green" if shown.has_passed else "bold red"))
    return Group(*parts)


def draw_injections(console: Console, injections: list[Injection]) -> RenderableType:
    """One line a fault: where it struck, what it came to, and how long that took."""
    right = ("#", "rank", "step", "detected", "recovered")
    names = ("#", "fault", "rank", "step", "phase", "came to", "rung", "detected", "recovered")
    table = new_table(console, *names, right=right)
    for number, injection in enumerate(injections, 1):
        incident = "" if injection.incident is None else f"incident {injection.incident}, {injection.outcome}"
        failure = f"not caused: {injection.failure}" if injection.failure else ""
        outcome = failure or incident or injection.effect or "nothing: not noticed"
        cells = (number, injection.kind, injection.rank, injection.step, injection.phase, outcome, injection.rung)
        table.add_row(
            *("-" if cell is None else str(cell) for cell in cells), _s(injection.detect_s), _s(injection.recover_s)
        )
    return table


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


# `ttprun check`: some steps of the script, with ranks killed at several moments.


USAGE = "ttprun check [--steps N] [--against FILE] [options of a launch] script.py [script args]"
HELP = """\
Would your script recover exactly if a rank died? Runs some optimizer steps of it, undisturbed, under ttprun and under
plain torchrun; both must give the same. Then runs it with one rank killed at several moments: before the first step, in
forward, backward and a collective, before, in and after optimizer.step, and in validation and while a checkpoint is
saved, if these steps include them. Killed in turn are rank 0, the last rank, and one rank of each coordinate of
'ttprun topology', 8 at most. Compares weights and optimizer state after each step, random numbers, variables, output,
and the files that the script writes.

YOUR SCRIPT REALLY RUNS. Each run gets a copy of the working folder, which is removed afterwards; but what the script
writes elsewhere by a full path, or sends to a service, is written and sent in each run. The ranks end right after the
last step: code after the training loop does not run.
"""
EPILOG = """\
Options before the script that are not listed here are those of a launch: 'ttprun run --help'.

exit codes: 0 every kill was recovered from exactly (--against: nothing differs) · 1 not all were, something differs, or
            nothing could be checked (it says why) · 2 the command line, or the file of --against, cannot be used
"""


def check(words: list[str]) -> int:
    """Check a script; `words` is a launch's command line with our options before the script. Returns the exit code.

    Raises ConfigError before anything is started.
    """
    if not words or words[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if words else 2
    own, checked = read_command_line(words)
    from ttprun.chaos.trial.check import check_script, run_traced

    golden = read_trace(Path(own.against)) if own.against else None
    signal.signal(signal.SIGTERM, _end)  # so that the copies are removed
    with place_for_runs(own.folder, "ttprun-check-") as place:
        place.mkdir(parents=True, exist_ok=True)
        if golden is not None:
            report, trace = run_traced(checked, place, _say, _show_progress)
            lines, is_same = compare_traces(golden, read_trace(trace)) if not report.problem else ([], False)
            lines += [*report.tail, *filter(None, [report.problem])]
            print(json.dumps({"same": is_same, "lines": lines}) if own.as_json else "\n".join(lines))
            return 0 if is_same else 1
        report = check_script(checked, place, _say, _show_progress)
        if own.as_json:
            print(json.dumps(report.to_json()))
        else:
            draw_check(report, own.folder)
        return 0 if report.is_exact else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "ttprun check", usage=USAGE, description=HELP, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )  # fmt: skip
    _add_options(parser)
    return parser


def _add_options(parser: ArgumentParser) -> None:
    from ttprun.chaos.trial.kills import STEPS

    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"optimizer steps (default {STEPS})")
    parser.add_argument(
        "--share", action="append", default=[], metavar="NAME",
        help="link this part of the working folder instead of copying it: data that is only read; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="FILE",
        help="kill no rank: run the steps once, and compare them with a trace of an earlier run (--trace FILE), as "
        "one in the repository; says what differs first, see 'ttprun diff'",
    )  # fmt: skip
    parser.add_argument("--in-place", action="store_true", help="no copies: all runs write into the working folder")
    parser.add_argument("--limit-s", type=float, default=600.0, metavar="S", help="limit for each run (default 600)")
    parser.add_argument("--folder", metavar="DIR", help="keep all runs there; default: they are removed")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report in JSON, for programs")


def read_command_line(words: Sequence[str]) -> tuple[Namespace, CheckTarget]:
    """Separate our options from those of a launch, and check them all. Raises ConfigError; starts nothing."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    from ttprun.chaos.trial.check import CheckTarget
    from ttprun.chaos.trial.kills import FEWEST_STEPS
    from ttprun.chaos.trial.twins import check_size
    from ttprun.cli.preflight import refuse
    from ttprun.cli.run import check_command
    from ttprun.cli.run import read_command_line as read_launch
    from ttprun.config_sources import option_name

    at = _script_at(words)
    own, options = _parser().parse_known_args(words[:at])
    launch = read_launch([*options, *words[at:]])
    torchrun, config = check_command(launch)
    asked = option_name(launch.asked[0]) if launch.asked else ""
    limit, nodes = f"{own.limit_s:g}", parse_min_max_nnodes(torchrun.nnodes)[1]
    cannot = "such a job cannot be checked", "rehearse it with 'ttprun drill'"
    refuse(
        (
            (own.steps < FEWEST_STEPS, f"--steps: {own.steps} are too few", f"give {FEWEST_STEPS} or more"),
            (own.limit_s <= 0, f"--limit-s: {limit} is not a number of seconds above 0", "leave it out for 600"),
            (nodes > 1, "--nnodes: a check runs on this machine alone", "leave it out"),
            (bool(torchrun.run_path), f"--run-path: {cannot[0]}", cannot[1]),
            (config.mindio, f"--mindio: {cannot[0]}", cannot[1]),
            (bool(asked), f"{asked}: not for a check, which runs the script", f"ttprun {asked} SCRIPT"),
            (bool(config.faults), "--fault: a check has faults of its own", "leave it out, or use 'ttprun drill'"),
        )
    )
    determine_local_world_size(torchrun.nproc_per_node)
    folder = Path.cwd()
    if not own.in_place:
        check_size(folder, own.share)
    return own, CheckTarget(
        options=options,
        # Of --no-python with a command that is a Python script, a launch makes that script.
        torchrun=config.launch | {"no_python": torchrun.no_python or torchrun.training_script != words[at]},
        command=words[at:],
        is_module=torchrun.module or torchrun.no_python,
        user_paths=config.user_paths,
        folder=folder,
        shared=own.share,
        is_in_place=own.in_place,
        steps=own.steps,
        limit_s=own.limit_s,
    )


def _script_at(words: Sequence[str]) -> int:
    """Where the script stands on the command line. Raises ConfigError for an option that nobody knows."""
    from ttprun.cli.command_line import build_parser, parse

    parser = build_parser()
    _add_options(parser)
    parsed = parse(parser, list(words))
    at = len(words) - len(parsed.training_script_args) - 1
    return at if words[at] == parsed.training_script else list(words).index(parsed.training_script)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(f"ttprun check: {text}", file=sys.stderr, flush=True)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r  {text} \r")
        sys.stderr.flush()


_NUMBERS = ("step", "rank", "steps again", "seconds")
_WORDS = {"exact": "green", "by a weaker rung": "yellow", "refused": "red", "differs": "bold red", "not tried": "dim"}


def draw_check(report: CheckReport, kept: str | None) -> None:
    """Print the table, what is not exact and why, and the verdict."""
    console = open_console()
    table = new_table(console, "killed", "step", "rank", "result", "by", "steps again", "seconds", right=_NUMBERS)
    for row in report.rows:
        lost, by = "-" if row.steps_lost is None else str(row.steps_lost), row.rung or "-"
        took = "-" if row.took_s is None else f"{row.took_s:.2f}"
        by += ", no standby ready" if row.had_standby is False else ""
        result = Text("recovered exactly" if row.result == "exact" else row.result, style=_WORDS[row.result])
        table.add_row(row.phase, str(row.step), str(row.rank), result, by, lost, took)
    if report.rows:
        console.print(table)
    by_reason: dict[str, KillOutcome] = {}
    for row in report.rows:
        if row.result != "exact":
            by_reason.setdefault(row.detail, row)
    for row in by_reason.values():
        console.print(Text(f"\n{row.phase}, step {row.step}, rank {row.rank}: {row.detail}", style="yellow"))
        if row.place:
            console.print(f"  where       {row.place}")
        console.print(f"  what to do  {row.cure}")
    for difference in report.differences:
        console.print(Text(f"differs: {difference.what} ({difference.detail})", style="bold red"))
    missed = f"not reached in {report.steps} steps: {', '.join(report.missed)} (--steps N for more steps)"
    for line in (
        *(f"differs between two undisturbed runs, so it is not compared: {text}" for text in report.by_itself),
        *(f"not proved: {text}" for text in report.not_proved),
        *(f"the others waited long for this call: {text}; for longer ones, raise --hang-timeout-s"
          for text in report.late),
        *([missed] if report.missed else []),
        *(f"  | {line}" for line in report.tail),
    ):  # fmt: skip
        console.print(line)
    if report.problem:
        console.print(Text(f"problem: {report.problem}", style="bold red"))
    exact = sum(row.result == "exact" for row in report.rows)
    verdict = f"{'EXACT' if report.is_exact else 'NOT EXACT'}: {exact} of {len(report.rows)} kills recovered exactly"
    console.print(Text(f"{verdict} · {report.took_s:.0f} s", style="bold green" if report.is_exact else "bold red"))
    if not report.is_exact and kept is None:
        print("ttprun check: --folder DIR keeps the runs and their logs", file=sys.stderr)
