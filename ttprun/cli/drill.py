"""`ttprun drill`: a rehearsal before a long job. Runs a script under faults, and its undisturbed twin."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttprun.chaos.drill.scenario import Scenario, command_of, read_scenario
from ttprun.chaos.drill.twins import place_for_runs
from ttprun.cli.terminal import new_table, open_console
from ttprun.config_sources import shipped

if TYPE_CHECKING:
    from ttprun.chaos.drill.compare import Injection
    from ttprun.chaos.drill.whole_drill import DrillReport


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


def run_drill(scenario: Scenario, place: Path, as_json: bool, is_kept: bool, names_hashes: bool = False) -> int:
    """Run the drill and report; returns the exit code: 0 if it has passed, else 1.

    place         an empty or new folder for both runs
    as_json       the report as one line of JSON
    is_kept       the folder stays, so how to keep it need not be said
    names_hashes  show the last line of rank 0 in both runs, too: the hash of the weights
    """
    from ttprun.chaos.drill.whole_drill import rehearse

    shown = rehearse(scenario, place, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(shown.to_json()))
    else:
        console = open_console()
        console.print(draw(console, shown))
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


def draw(console: Console, shown: DrillReport) -> RenderableType:
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
        if injection.failure:
            outcome = f"not caused: {injection.failure}"
        elif injection.incident is not None:
            outcome = f"incident {injection.incident}, {injection.outcome}"
        else:
            outcome = injection.effect or "nothing: not noticed"
        cells = (number, injection.kind, injection.rank, injection.step, injection.phase, outcome, injection.rung)
        table.add_row(
            *("-" if cell is None else str(cell) for cell in cells), _s(injection.detect_s), _s(injection.recover_s)
        )
    return table


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
