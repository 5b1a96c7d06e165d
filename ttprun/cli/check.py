"""`ttprun check`: is this script recovered on this machine? Runs some steps of it, kills ranks, and compares."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.text import Text

from ttprun.cli.terminal import new_table, open_console
from ttprun.errors import ConfigError

if TYPE_CHECKING:
    from ttprun.chaos.check.checkup import CheckReport
    from ttprun.chaos.check.kill_rows import KillOutcome
    from ttprun.chaos.check.trial import CheckTarget

USAGE = "ttprun check [--steps N] [options of a launch] script.py [script args]"
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

exit codes: 0 every kill was recovered from exactly · 1 not all were, or nothing could be checked (it says why) ·
            2 the command line cannot be used
"""


def check(words: list[str]) -> int:
    """Check a script; `words` is a launch's command line with our options before the script. Returns the exit code.

    Raises ConfigError before anything is started.
    """
    if not words or words[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if words else 2
    own, checked = read_command_line(words)
    from ttprun.chaos.check.checkup import check_script
    from ttprun.chaos.drill.twins import place_for_runs

    signal.signal(signal.SIGTERM, _end)  # so that the copies are removed
    with place_for_runs(own.folder, "ttprun-check-") as place:
        place.mkdir(parents=True, exist_ok=True)
        report = check_script(checked, place, _say, _show_progress)
        if own.as_json:
            print(json.dumps(report.to_json()))
        else:
            draw(report, own.folder)
        return 0 if report.is_exact else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "ttprun check", usage=USAGE, description=HELP, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )  # fmt: skip
    _add_options(parser)
    return parser


def _add_options(parser: ArgumentParser) -> None:
    from ttprun.chaos.check.plan import STEPS

    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"optimizer steps (default {STEPS})")
    parser.add_argument(
        "--share", action="append", default=[], metavar="NAME",
        help="link this part of the working folder instead of copying it: data that is only read; may be repeated",
    )  # fmt: skip
    parser.add_argument("--in-place", action="store_true", help="no copies: all runs write into the working folder")
    parser.add_argument("--limit-s", type=float, default=600.0, metavar="S", help="limit for each run (default 600)")
    parser.add_argument("--folder", metavar="DIR", help="keep all runs there; default: they are removed")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report in JSON, for programs")


def read_command_line(words: Sequence[str]) -> tuple[Namespace, CheckTarget]:
    """Separate our options from those of a launch, and check them all. Raises ConfigError; starts nothing."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    from ttprun.chaos.check.plan import FEWEST_STEPS
    from ttprun.chaos.check.trial import CheckTarget
    from ttprun.chaos.check.working_copy import check_size
    from ttprun.cli.run import check_command
    from ttprun.cli.run import read_command_line as read_launch
    from ttprun.config_sources import option_name

    at = _script_at(words)
    own, options = _parser().parse_known_args(words[:at])
    launch = read_launch([*options, *words[at:]])
    torchrun, config = check_command(launch)
    if own.steps < FEWEST_STEPS:
        raise ConfigError(f"--steps: {own.steps} are too few", f"give {FEWEST_STEPS} or more")
    if own.limit_s <= 0:
        raise ConfigError(f"--limit-s: {own.limit_s:g} is not a number of seconds above 0", "leave it out for 600")
    if parse_min_max_nnodes(torchrun.nnodes)[1] > 1:
        raise ConfigError("--nnodes: a check runs on this machine alone", "leave it out")
    for name, is_so in (("--run-path", torchrun.run_path), ("--mindio", config.mindio)):
        if is_so:
            raise ConfigError(f"{name}: such a job cannot be checked", "rehearse it with 'ttprun drill'")
    if launch.asked:
        name = option_name(launch.asked[0])
        raise ConfigError(f"{name}: not for a check, which runs the script", f"ttprun {name} SCRIPT")
    if config.faults:
        raise ConfigError("--fault: a check has faults of its own", "leave it out, or use 'ttprun drill'")
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
    from ttprun.cli.torchrun_parser import build_parser, parse

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


def draw(report: CheckReport, kept: str | None) -> None:
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
    for row in _one_a_reason(report.rows):
        console.print(Text(f"\n{row.phase}, step {row.step}, rank {row.rank}: {row.detail}", style="yellow"))
        if row.place:
            console.print(f"  where       {row.place}")
        console.print(f"  what to do  {row.cure}")
    for difference in report.differences:
        console.print(Text(f"differs: {difference.what} ({difference.detail})", style="bold red"))
    for text in report.by_itself:
        console.print(f"differs between two undisturbed runs, so it is not compared: {text}")
    for text in report.not_proved:
        console.print(f"not proved: {text}")
    for text in report.late:
        console.print(f"the others waited long for this call: {text}; for longer ones, raise --hang-timeout-s")
    if report.missed:
        console.print(f"not reached in {report.steps} steps: {', '.join(report.missed)} (--steps N for more steps)")
    for line in report.tail:
        console.print(f"  | {line}")
    if report.problem:
        console.print(Text(f"problem: {report.problem}", style="bold red"))
    exact = sum(row.result == "exact" for row in report.rows)
    verdict = f"{'EXACT' if report.is_exact else 'NOT EXACT'}: {exact} of {len(report.rows)} kills recovered exactly"
    console.print(Text(f"{verdict} · {report.took_s:.0f} s", style="bold green" if report.is_exact else "bold red"))
    if not report.is_exact and kept is None:
        print("ttprun check: --folder DIR keeps the runs and their logs", file=sys.stderr)


def _one_a_reason(rows: Sequence[KillOutcome]) -> Iterator[KillOutcome]:
    """Of the rows that are not exact, the first with each reason."""
    printed = set()
    for row in rows:
        if row.result != "exact" and row.detail not in printed:
            printed.add(row.detail)
            yield row
