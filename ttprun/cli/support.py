"""The support matrix of `ttprun guide support`: from guide/support.yaml and from the results of the tests.

Results are files of the repository (tests/results), shipped in the package. Begin with `support_matrix`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.web.page import as_html, as_markdown, read_run

# `ttprun report`: a run after the fact, as one HTML file or as Markdown; from its directory alone, without torch.


def report(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File to write; -: standard output. Default: report.html.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown for a ticket; to standard output, unless -o names a file.")
    ] = False,
) -> int:
    """Write a report of a run: state, speed, where the time went, incidents with what was proved, and events.

    The HTML file is complete in itself and loads nothing from elsewhere.
    """
    recorded = read_run(RunDirectory.find(run))
    text = as_markdown(recorded) if markdown else as_html(recorded)
    target = output or ("-" if markdown else "report.html")
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written ({error.strerror})", "name another file with -o") from None
    print(f"{target}: {recorded.summary.sentence}")
    return 0


TABLE = Path(__file__).resolve().parent.parent / "guide" / "support.yaml"
COSTS = {
    "replace": "that rank alone gets a new process; no step is lost",
    "rerun": "the same, in its own process",
    "rewind": "all ranks go back to the newest snapshot",
    "resize": "the others train on without it",
    "restart": "all ranks start again, from the state that is saved when the rank is lost if that can be used",
    "not protected": "as under torchrun",
}


def support_matrix() -> str:
    """Markdown: each row with its tests, and the releases that were tried."""
    table, slow = read_table(), read_results("slow.json")
    lines: list[str] = []
    for lost, cost in COSTS.items():
        lines += [f"## {lost}: {cost}", ""]
        for row in table["rows"]:
            if row["lost"] == lost:
                lines += [*_row(row, slow), ""]
    lines += ["## Releases", "", "A dozen whole jobs, one of each kind of recovery, were run on these:", ""]
    for pair, seen in read_results("versions.json").items():
        lines.append(f"* {pair}: {seen['passed']} passed, {seen['failed']} failed, {seen['date']}, {seen['commit']}")
    return "\n".join(lines)


def _row(row: dict[str, Any], slow: dict[str, dict[str, Any]]) -> Iterator[str]:
    device = ", on a simulated device only" if row["device"] == "simulated" else ""
    yield f"* **{row['backend']} · {row['parallelism']}**{device}: {row['program']}"
    for often, tests in row["proof"].items():
        for test in tests:
            seen = "" if often == "every check" else f" ({last_green(test, slow)})"
            yield f"  * {often}{seen}: `tests/{test}`"


def last_green(test: str, slow: dict[str, dict[str, Any]]) -> str:
    """When the cases of a test were last seen green, and with what; of several cases, the one longest ago."""
    name = test.rpartition("/")[2]
    cases = [seen for case, seen in slow.items() if case.partition("[")[0] == name]
    greens = sorted((case["green"] for case in cases if "green" in case), key=lambda green: str(green["date"]))
    failed = sum("failed" in case for case in cases)
    words = [f"{failed} cases failed in their last run"] if failed else []
    if not greens:
        return ", ".join(["not seen green on this code yet", *words])
    first = greens[0]
    versions = f"torch {first['torch']}, Python {first['python']}"
    return ", ".join([f"{len(greens)} cases green, {first['date']}, {first['commit']}, {versions}", *words])


def read_table() -> dict[str, Any]:
    """The parts (the README's rows) and the rows of the matrix."""
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def read_results(name: str) -> dict[str, dict[str, Any]]:
    """A file of results: in an installed package beside this one, in a checkout among the tests; {} where it is not."""
    package = TABLE.parent.parent
    for folder in (package / "results", package.parent / "tests" / "results"):
        if (folder / name).is_file():
            results: dict[str, dict[str, Any]] = json.loads((folder / name).read_text(encoding="utf-8"))
            return results
    return {}
