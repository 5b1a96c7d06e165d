"""`ttprun doctor`: what is here, what will work and what will not, each with the cure. Itself without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from ttprun.cli.finding import Finding
from ttprun.cli.machine_checks import CHECKS
from ttprun.cli.repair_check import repair
from ttprun.cli.software_checks import Probe, accelerators, mindio_variables, software
from ttprun.cli.terminal import new_table, open_console

MARKS = {"ok": "ok", "note": "note", "fails": "FAILS"}
STYLES = {"ok": "green", "note": "yellow", "fails": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
) -> int:
    """Say what of this machine training with recovery can use, what will not work, and the cure.

    A job of two tiny ranks is run, one of which is killed and must be replaced: that takes some ten seconds. Nothing is
    changed, and nothing remains afterwards. Exit code: 0 training with recovery can work here, 1 it cannot.
    """
    probe = Probe()  # it imports torch while we look at the rest
    of_machine = [finding for check in CHECKS for finding in examined(check.__name__, check)]
    answer = probe.read()
    findings = [
        *examined("software", lambda: software(answer)),
        *examined("repair", lambda: repair(answer["torch"]) if "torch" in answer else ()),
        *examined("devices", lambda: accelerators(answer)),
        *of_machine,
        *examined("mindio", lambda: mindio_variables(os.environ)),
    ]
    can_work = not any(finding.level == "fails" for finding in findings)
    if as_json:
        print(json.dumps({"ok": can_work, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(findings, can_work)
    return 0 if can_work else 1


def examined(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; that it could not be made is one too."""
    try:
        yield from check()
    except Exception as error:
        found = f"could not be checked ({type(error).__name__}: {error})"
        yield Finding(name, "check", found, "note", "it is not known whether it works", "report this")


def show(findings: list[Finding], can_work: bool) -> None:
    """Print the findings as a table, and the verdict."""
    console = open_console()
    table = new_table(console, "", "area", "what", "found", "means", "cure")
    for finding in findings:
        mark = MARKS[finding.level]
        cells = (finding.area, finding.subject, finding.found, finding.means, finding.cure)
        table.add_row(mark, *cells, style=None if finding.level == "ok" else STYLES[finding.level])
    console.print(table)
    failed = [finding.subject for finding in findings if finding.level == "fails"]
    notes = sum(finding.level == "note" for finding in findings)
    if can_work:
        console.print(f"training with recovery can work here ({notes} note{'s' if notes != 1 else ''})")
    else:
        console.print(f"training with recovery cannot work here: {', '.join(failed)}")
    console.file.flush()
