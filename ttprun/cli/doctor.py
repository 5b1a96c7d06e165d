"""`ttprun doctor`: what is here, what will work and what will not, each with the cure. Itself without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from ttprun.cli.device_check import devices_at_work
from ttprun.cli.finding import Finding
from ttprun.cli.machine_checks import CHECKS
from ttprun.cli.repair_check import repair
from ttprun.cli.software_checks import Probe, accelerators, mindio_variables, software
from ttprun.cli.terminal import open_console
from ttprun.errors import counted

MARKS = {"ok": "ok", "note": "note", "fails": "FAILS"}
STYLES = {"ok": "green", "note": "yellow", "fails": "bold red"}
# Columns of mark, area and subject; what is found begins behind them, so that rows can be printed as they come.
WIDTHS = (5, 8, 24)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
) -> int:
    """Check this machine: what of recovery works here, what does not, and how to fix it.

    Each row is printed when it is known. A job of two tiny ranks is run, one of which is killed and must be replaced:
    that takes about ten seconds, and another ten where there is a GPU or an NPU, on which two ranks try what a recovery
    needs. Nothing is changed, and nothing remains afterwards. Exit code: 0 training with recovery can work here, 1 it
    cannot.
    """
    console = open_console()
    findings = []
    if not as_json and not console.is_terminal:
        console.print("  ".join(("", "area", "what", "found", "means", "cure")))
    for finding in all_findings():
        findings.append(finding)
        if not as_json:
            show(console, finding)
    can_work = not any(finding.level == "fails" for finding in findings)
    if as_json:
        print(json.dumps({"ok": can_work, "findings": [asdict(finding) for finding in findings]}))
    else:
        conclude(console, findings)
    return 0 if can_work else 1


def all_findings() -> Iterator[Finding]:
    """Everything, as it is found: what is known at once comes first."""
    probe = Probe()  # it imports torch while we look at the rest
    for check in CHECKS:
        yield from examined(check.__name__, check)
    yield from examined("mindio", lambda: mindio_variables(os.environ))
    answer = probe.read()
    yield from examined("software", lambda: software(answer))
    yield from examined("devices", lambda: accelerators(answer))
    yield from examined("two ranks", lambda: devices_at_work(answer))
    if "torch" in answer:
        yield from examined("repair", lambda: repair(answer["torch"]))


def examined(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; that it could not be made is one too."""
    try:
        yield from check()
    except Exception as error:
        result = f"could not be checked ({type(error).__name__}: {error})"
        yield Finding(name, "check", result, "note", "it is not known whether it works", "report this")


def show(console: Console, finding: Finding) -> None:
    """Print one finding, at once: in a pipe one line, on a terminal with what it means and the cure below it."""
    cells = (MARKS[finding.level], finding.area, finding.subject)
    begin = "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    further = [text for text in (finding.means, finding.cure) if text]
    style = None if finding.level == "ok" else STYLES[finding.level]
    if console.is_terminal:
        indent = " " * (sum(WIDTHS[:2]) + 4)
        lines = (f"{begin}  {finding.found}", *(f"{indent}{text}" for text in further))
        for line in lines:
            console.print(line, style=style)
    else:
        console.print("  ".join((begin, finding.found, *further)))
    console.file.flush()


def conclude(console: Console, findings: list[Finding]) -> None:
    """Print the verdict."""
    failed = [finding.subject for finding in findings if finding.level == "fails"]
    notes = sum(finding.level == "note" for finding in findings)
    if not failed:
        console.print(f"training with recovery can work here ({counted(notes, 'note')})")
    else:
        console.print(f"training with recovery cannot work here: {', '.join(failed)}")
    console.file.flush()
