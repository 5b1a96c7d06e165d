"""The page, put together from the files in `page/`: one document that asks for nothing else but data.

The report of a run is the same document with the data inside. Begin with `live`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ttprun import __version__
from ttprun.errors import ConfigError, counted
from ttprun.observe.events import COLUMNS, Point, read_events, read_history, seconds_of
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import IncidentStatus, RunStatus, read_status
from ttprun.web.feed import REASONS, Summary, describe_rate, summarize, unix_s

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("parts.js", "ranks.js", "charts.js", "incidents.js", "facts.js", "main.js")


@cache
def live() -> str:
    """The page that follows a run."""
    return _document("null")


@cache
def policy() -> str:
    """The content security policy under which the page works: its own script and styles, data from where it comes."""
    return (
        f"default-src 'none'; script-src '{_digest(_script())}'; style-src '{_digest(_style())}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _document(data: str) -> str:
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    text = text.replace("/* styles */", _style()).replace("/* scripts */", _script())
    return text.replace("<!-- data -->", f'<script type="application/json" id="data">{data}</script>')


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _style() -> str:
    return (_FOLDER / "page.css").read_text(encoding="utf-8")


@cache
def _script() -> str:
    words = f'"use strict";\nconst REASONS = {json.dumps(REASONS)};'  # as the report of a run has them, too
    return "\n".join([words, *((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)])


# The report of a run after the fact: from its directory alone, as the page shows it, or as Markdown for a ticket.


_EVENTS = 20_000  # of the log, the newest


@dataclass(frozen=True)
class Run:
    """All that is reported of one launch.

    topology   as the agent wrote it; None if it was never known
    settings   the resolved configuration, "" if it is gone
    """

    status: RunStatus
    summary: Summary
    events: list[dict[str, Any]]
    history: list[Point]
    topology: Any
    settings: str


def read_run(directory: RunDirectory) -> Run:
    """Read the files of a run. Raises ConfigError if it has no status."""
    try:
        status = read_status(directory.status)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the run in '{directory.path}' has no status ({error})", "name another run") from None
    started_s = unix_s(status.started_at)
    events: list[dict[str, Any]] = []
    topology: Any = None
    settings = ""
    with suppress(OSError):
        events = [event for event in read_events(directory.events) if _is_of_launch(event, started_s)]
    with suppress(OSError, ValueError):
        topology = json.loads(directory.topology.read_text(encoding="utf-8"))
    with suppress(OSError):
        settings = directory.config.read_text(encoding="utf-8", errors="replace")
    history = read_history(directory.history, started_s)
    return Run(status, summarize(status, history, events), events[-_EVENTS:], history, topology, settings)


def as_html(run: Run) -> str:
    """The page of a run with all that it shows inside: it can be read without a server, and sent to others."""
    data = {
        "status": asdict(run.status),
        "summary": asdict(run.summary),
        "topology": run.topology,
        "history": [[point.unix_s, point.step] for point in run.history],
        "events": run.events,
        "settings": run.settings,
        "note": f"Report of ttprun {__version__}, as of {run.status.updated_at}.",
    }
    return _document(json.dumps(data).replace("<", "\\u003c"))


def as_markdown(run: Run) -> str:
    """A run in some lines of Markdown, for a ticket."""
    status, summary = run.status, run.summary
    lines = [f"# Run {status.run_id}", "", summary.sentence, ""]
    lines += [
        f"* started {status.started_at}, last seen {status.updated_at}, on {', '.join(status.nodes) or status.host}",
        f"* {counted(status.world_size, 'rank')}, generation {status.generation}, step {status.step}",
        f"* speed: {'not known' if summary.steps_per_s is None else describe_rate(summary.steps_per_s)}",
        f"* protection: {status.protection}",
        f"* ttprun {__version__}",
        *(f"* not proved: {name}" for name in status.not_proved),
        *(f"* rank {rank} holds the others up" for rank in summary.stragglers),
        "",
    ]
    if status.is_leading:
        lost = [(REASONS[reason], spent_s) for reason, spent_s in summary.lost_s.items() if spent_s]
        spent = [("productive: steps done for the first time", summary.productive_s), *lost, ("all", summary.wall_s)]
        lines += ["| time | seconds | share |", "|---|---:|---:|"]
        whole_s = summary.wall_s or float("inf")
        lines += [f"| {what} | {spent_s:.1f} | {100 * spent_s / whole_s:.1f} % |" for what, spent_s in spent]
    else:
        lines.append("Where the time went is known to the node whose agent leads.")
    for incident in status.incidents:
        lines += ["", *_incident(incident)]
    return "\n".join(lines) + "\n"


def _is_of_launch(event: dict[str, Any], started_s: float) -> bool:
    with suppress(KeyError, TypeError, ValueError):
        return unix_s(event["at"]) >= started_s and "event" in event
    return False


def _incident(incident: IncidentStatus) -> list[str]:
    seconds = seconds_of(incident)
    explained = f" (ttprun explain {incident.reason_kind})" if incident.reason_kind else ""
    took = [f"{seconds[phase]:.3f}" if phase in seconds else "–" for phase in COLUMNS]
    ranks = ", ".join(map(str, incident.ranks)) or "none"
    lost = "not counted" if incident.steps_lost is None else f"{incident.steps_lost}"
    return [
        f"## Incident {incident.id}: {incident.kind}, {incident.outcome}",
        "",
        f"{incident.reason}{explained}. "
        f"Ranks lost: {ranks}; rung: {incident.rung or 'none'}; boundary: {incident.boundary}; steps lost: {lost}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---:|" * len(COLUMNS),
        f"| {' | '.join(took)} |",
        "",
        *(f"* equal: {what}" for what in incident.equal),
        *(f"* not proved: {what}" for what in incident.not_proved),
    ]
