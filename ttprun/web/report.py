"""The report of a run after the fact: from its directory alone, as the page shows it, or as Markdown for a ticket.

Begin with `read_run`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ttprun import __version__
from ttprun.errors import ConfigError
from ttprun.observe.events import read_events
from ttprun.observe.history import Point, read_history
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.spans import COLUMNS, seconds_of
from ttprun.observe.status import IncidentStatus, RunStatus, read_status
from ttprun.web import page
from ttprun.web.summary import REASONS, Summary, describe_rate, summarize, unix_s

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
    """One self-contained document."""
    data = {
        "status": asdict(run.status),
        "summary": asdict(run.summary),
        "topology": run.topology,
        "history": [[point.unix_s, point.step] for point in run.history],
        "events": run.events,
        "settings": run.settings,
        "note": f"Report of ttprun {__version__}, as of {run.status.updated_at}.",
    }
    return page.report(data)


def as_markdown(run: Run) -> str:
    """A run in some lines of Markdown, for a ticket."""
    status, summary = run.status, run.summary
    lines = [f"# Run {status.run_id}", "", summary.sentence, ""]
    lines += [
        f"* started {status.started_at}, last seen {status.updated_at}, on {', '.join(status.nodes) or status.host}",
        f"* {status.world_size} ranks, generation {status.generation}, step {status.step}",
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
        lines += [_share(what, spent_s, summary.wall_s) for what, spent_s in spent]
    else:
        lines.append("Where the time went is known to the node whose agent leads.")
    for incident in status.incidents:
        lines += ["", *_incident(incident)]
    return "\n".join(lines) + "\n"


def _is_of_launch(event: dict[str, Any], started_s: float) -> bool:
    with suppress(KeyError, TypeError, ValueError):
        return unix_s(event["at"]) >= started_s and "event" in event
    return False


def _share(what: str, spent_s: float, wall_s: float) -> str:
    return f"| {what} | {spent_s:.1f} | {100 * spent_s / wall_s if wall_s else 0.0:.1f} % |"


def _incident(one: IncidentStatus) -> list[str]:
    known = seconds_of(one)
    took = [f"{known[phase]:.3f}" if phase in known else "–" for phase in COLUMNS]
    ranks = ", ".join(map(str, one.ranks)) or "none"
    lost = "not counted" if one.steps_lost is None else f"{one.steps_lost}"
    return [
        f"## Incident {one.id}: {one.kind}, {one.outcome}",
        "",
        f"{one.reason}. Ranks lost: {ranks}; rung: {one.rung or 'none'}; boundary: {one.boundary}; steps lost: {lost}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---:|" * len(COLUMNS),
        f"| {' | '.join(took)} |",
        "",
        *(f"* equal: {what}" for what in one.equal),
        *(f"* not proved: {what}" for what in one.not_proved),
    ]
