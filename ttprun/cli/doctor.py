"""`ttprun doctor`: what is here, what will work and what will not, each with the cure. Itself without torch."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ttprun import __version__
from ttprun.chaos.trial.twins import Launch, clean_environment
from ttprun.cli.machine_checks import CHECKS, Finding, judged
from ttprun.cli.software_checks import Probe, accelerators, mindio_variables, software
from ttprun.cli.terminal import open_console
from ttprun.errors import ConfigError, counted
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.run_view import RunView

MARKS = {"ok": "ok", "note": "note", "fails": "FAILS"}
STYLES = {"ok": "green", "note": "yellow", "fails": "bold red"}
# Columns of mark, area and subject; what is found begins behind them, so that rows can be printed as they come.
WIDTHS = (5, 8, 24)
# Packages whose releases matter to whoever reads a bug report, as pip names them.
PACKAGES = re.compile(
    r"(?i)ttprun|torch.*|numpy|transformers|trl|accelerate|datasets|.*lightning|deepspeed|nvidia-nccl.*"
)
# What a bug report leaves out: the rest of an address, and the value behind a name such as `--api-key` or `token:`.
HIDDEN = re.compile(
    r"""(?i)(\w+://)[^\s"'\\]+|([\w-]*(?:(?:api|[_-])key|token|secret|passw(?:or)?d|credentials?)"""
    r"""[ \t:="'\\]+)[^\s"',}\\]+"""
)
NEWEST_EVENTS = 200


def doctor(
    file: Annotated[str | None, typer.Argument(help="With --report: the file. Default: ttprun-report.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
    with_report: Annotated[
        bool, typer.Option("--report", help="Also write one file for a bug report, with the newest run here.")
    ] = False,
) -> int:
    """Check this machine: what of recovery works here, what does not, and how to fix it.

    Each row is printed when it is known. A job of two tiny ranks is run, one of which is killed and must be replaced:
    that takes about ten seconds, and another ten where there is a GPU or an NPU, on which the same is done. Nothing is
    changed, and nothing but a report remains. Exit code: 0 training with recovery can work here, 1 it cannot.
    """
    report = Path(file or "ttprun-report.md") if with_report else None
    if file and report is None:
        raise ConfigError(f"'{file}' is not needed", f"to write a file for a bug report: ttprun doctor --report {file}")
    if report is not None:
        write_report(report, [])  # if it cannot be written, that is said before the checks
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
    if report is not None:
        write_report(report, findings)
        if not as_json:
            console.print(
                f"{report}: written; read it before you publish it: it has command lines, paths and host names"
            )
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
    for pair in (pair_of(answer), ON_THE_CPU) if "torch" in answer else ():
        if pair is not None:
            yield from examined("repair", partial(repair, answer["torch"], pair))


def examined(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; that it could not be made is one too."""
    try:
        yield from check()
    except Exception as error:
        result = f"could not be checked ({type(error).__name__}: {error})"
        yield Finding(name, "check", result, "note", "it is not known whether it works", "report this")


def show(console: Console, finding: Finding) -> None:
    """Print one finding, at once: in a pipe one line, on a terminal with what it means and the cure below it."""
    begin, *further = cells_of(finding)
    style = None if finding.level == "ok" else STYLES[finding.level]
    if console.is_terminal:
        indent = " " * (sum(WIDTHS[:2]) + 4)
        lines = (begin, *(f"{indent}{text}" for text in further))
        for line in lines:
            console.print(line, style=style)
    else:
        console.print("  ".join((begin, *further)))
    console.file.flush()


def cells_of(finding: Finding) -> list[str]:
    """What is printed of a finding: what was found, then what it means and the cure, if there are any."""
    heads = zip((MARKS[finding.level], finding.area, finding.subject), WIDTHS, strict=True)
    begin = "  ".join((*(cell.ljust(width) for cell, width in heads), finding.found))
    return [begin, *(text for text in (finding.means, finding.cure) if text)]


def conclude(console: Console, findings: list[Finding]) -> None:
    """Print the verdict."""
    failed = [finding.subject for finding in findings if finding.level == "fails"]
    notes = sum(finding.level == "note" for finding in findings)
    if not failed:
        console.print(f"training with recovery can work here ({counted(notes, 'note')})")
    else:
        console.print(f"training with recovery cannot work here: {', '.join(failed)}")
    console.file.flush()


def write_report(file: Path, findings: list[Finding]) -> None:
    """Write what a bug report needs: versions, findings, the newest run. Raises ConfigError if it cannot be written."""
    installed = {f"{package.name} {package.version}" for package in distributions() if PACKAGES.fullmatch(package.name)}
    parts = [
        f"# ttprun {__version__}, Python {platform.python_version()}, {platform.platform()}\n",
        "\n".join(f"* {package}" for package in sorted(installed)),
        "\n## ttprun doctor\n",
        "\n".join("    " + "  ".join(cells_of(finding)) for finding in findings),
        "",
    ]
    from ttprun.web.page import as_markdown

    try:
        run = RunView(RunDirectory.find())
    except ConfigError as error:
        parts.append(f"# No run\n\n{error}\n")
    else:
        events = "\n".join(line.text for line in [*run.lines][-NEWEST_EVENTS:])
        blocks = {"Status": json.dumps(asdict(run.status)), "Newest events": events, "Configuration": run.settings}
        parts += [as_markdown(run), *(f"## {name}\n\n```\n{text}\n```\n" for name, text in blocks.items())]
    try:
        if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith("# ttprun "):
            raise ConfigError(f"'{file}' is there, and is no report", "name another file")
        file.write_text(HIDDEN.sub(r"\1\2(hidden)", "\n".join(parts)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be written ({error.strerror})", "name another file") from None


# What `ttprun doctor` sees of a repair: it runs a job of two tiny ranks on the installed torch, and one is killed.


LIMIT_S = 90.0
FAULT = "kill:rank=1,step=3,phase=backward"
BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
SCRIPT = """\
import os
import sys
import torch
import torch.distributed as dist

kind, backend, *indices = sys.argv[1:]
rank = int(os.environ["RANK"])
if kind == "cuda" and indices[0] == indices[1]:  # NCCL takes ranks on one GPU only if they seem to be on two machines
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
if kind != "cpu":
    torch.get_device_module(kind).set_device(int(indices[rank]))
dist.init_process_group(backend)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(kind))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + step + rank, device=kind)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
_CURE = "install a release of torch that was tried (see README), and report this"


@dataclass(frozen=True)
class Pair:
    """Two ranks and their devices.

    kind     "cuda", "npu" or "cpu"
    indices  of both devices, which may be the same one
    """

    kind: str
    indices: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        first, other = self.indices
        where = f"{self.kind} {first}" if first == other else f"{self.kind} {first} and {other}"
        return f"{'the CPU' if self.kind == 'cpu' else where}, {BACKENDS[self.kind]}"


ON_THE_CPU = Pair("cpu")


def pair_of(probed: Mapping[str, Any]) -> Pair | None:
    """Which devices two ranks would use; None: there is none.

    probed  what `Probe.read` has returned
    """
    usable = [(device["kind"], device["index"]) for device in probed.get("devices", ()) if device["is_usable"]]
    for kind in ("cuda", "npu"):
        indices = [index for of, index in usable if of == kind]
        if indices:
            return Pair(kind, (indices[0], indices[1] if len(indices) > 1 else indices[0]))
    return None


def repair(version: str, pair: Pair = ON_THE_CPU, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Whether a killed rank is replaced here, on this torch. Blocks for `limit_s` at most; nothing remains afterwards.

    version   of torch, for what is said
    """
    with tempfile.TemporaryDirectory(prefix="ttprun-doctor-") as folder:
        took_s, why_not = _run(Path(folder), pair, limit_s)
    where = "" if pair is ON_THE_CPU else f" ({pair})"
    result = (
        f"on torch {version}{where}: {why_not}" if why_not else f"a killed rank was replaced in {took_s:.1f} s{where}"
    )
    if pair is ON_THE_CPU:
        means = "a rank that dies is not replaced; training itself runs as under torchrun"
        yield judged("software", "repair", result, not why_not, means, _CURE, "fails")
    elif pair.kind == "cuda" and pair.indices[0] == pair.indices[1]:
        means = "with one device here it was not tried what works on several"
        cure = "let two processes use it (nvidia-smi: compute mode Default), or try a machine with two"
        yield judged("devices", "repair on a device", result, not why_not, means, cure)
    else:
        means = "a rank that dies is not replaced on these devices, or they cannot be used"
        cure = "report this, with what NCCL_DEBUG=INFO or the logs of CANN say"
        yield judged("devices", "repair on a device", result, not why_not, means, cure, "fails")


def _run(folder: Path, pair: Pair, limit_s: float) -> tuple[float, str]:
    """Run the tiny job; returns (seconds of its repair, why there was none: "" if there was)."""
    script = folder / "two_tiny_ranks.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [str(script), pair.kind, BACKENDS[pair.kind], *map(str, pair.indices)]
    options = ["--standalone", "--nproc-per-node", "2", "--standbys", "0", "--allow-faults", "--fault", FAULT]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).resolve().parents[2])  # the job may run in a folder from which ttprun cannot be imported
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), here)))
    twin = Launch("ttprun", options, words, environment, limit_s).run(folder)
    if twin.problem:
        return 0.0, f"the job of two tiny ranks: {twin.problem}"
    incidents = twin.status.incidents if twin.status is not None else ()
    if twin.exit_code == 0 and [(past.rung, past.outcome) for past in incidents] == [("replace", "recovered")]:
        return incidents[0].total_s or 0.0, ""
    said = (folder / "launcher.log").read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in said if line.strip()] or ["the rank was not killed"]
    return 0.0, f"the job ended with exit code {twin.exit_code}: {incidents[0].reason if incidents else lines[-1]}"
