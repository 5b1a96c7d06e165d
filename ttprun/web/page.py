"""The page, put together from the files in `page/`: one document that asks for nothing else but data.

The report of a run is the same document with the data inside. Begin with `live`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ttprun import __version__
from ttprun.errors import counted
from ttprun.observe.events import COLUMNS, seconds_of
from ttprun.observe.run_view import REASONS, RunView, describe_rate, in_seconds, sentences_of
from ttprun.observe.status import IncidentStatus

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


def as_html(run: RunView) -> str:
    """The page of a run with all that it shows inside: it can be read without a server, and sent to others."""
    data = {
        "status": asdict(run.status),
        "summary": asdict(run.summary),
        "topology": json.loads(run.topology_json),
        "history": [[point.unix_s, point.step] for point in run.history],
        "events": [line.event for line in run.lines],
        "settings": run.settings,
        "note": f"Report of ttprun {__version__}, as of {run.status.updated_at}.",
    }
    return _document(json.dumps(data).replace("<", "\\u003c"))


def as_markdown(run: RunView) -> str:
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


def _incident(incident: IncidentStatus) -> list[str]:
    seconds = seconds_of(incident)
    explained = f" (ttprun explain {incident.reason_kind})" if incident.reason_kind else ""
    lost = "not counted" if incident.steps_lost is None else f"{incident.steps_lost}"
    return [
        f"## Incident {incident.id}: {incident.kind}, {incident.outcome}",
        "",
        f"{incident.reason}{explained}. "
        f"Ranks lost: {', '.join(map(str, incident.ranks)) or 'none'}; rung: {incident.rung or 'none'}; "
        f"boundary: {incident.boundary}; steps lost: {lost}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---:|" * len(COLUMNS),
        f"| {' | '.join(in_seconds(seconds.get(phase)) for phase in COLUMNS)} |",
        "",
        *(f"* {sentence}" for sentence in sentences_of(incident)),
    ]
