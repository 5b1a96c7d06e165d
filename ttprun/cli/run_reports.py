"""`ttprun status`, `topology` and `report`: what the files in a run's directory say, so also after its end.

Without torch. Begin with `status`, and with `draw` for what of it people see.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttprun.cli.terminal import fitting_table
from ttprun.errors import ConfigError, counted, in_short
from ttprun.observe.console import format_bytes
from ttprun.observe.events import COLUMNS, seconds_of, spans_of, unix_s
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.run_view import RunView, in_seconds, sentences_of
from ttprun.observe.status import (
    CheckpointStatus,
    IncidentStatus,
    RankTopology,
    ResumeStatus,
    RunStatus,
    Topology,
    describe_cost,
    describe_protection,
    read_topology,
)
from ttprun.protocol.reason import pointer
from ttprun.state.cost_limits import in_words

STYLES = {"healthy": "green", "done": "green", "failed": "red"}
STYLES |= dict.fromkeys(("recovering", "restarting", "stopped"), "yellow")
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 40  # characters of the curve of speeds, at most
# What a narrow terminal does without, the first one first: never a rank, its pid and state, nor how an incident ended.
_SPARE = {
    "ranks": ("local", "protection", "last seen", "phase", "node", "step"),
    "incidents": ("boundary", "steps lost", "rung", "ranks"),
    "phases": ("detect", "reissue", "transfer", "rebuild", "freeze"),
}


def draw(console: Console, shown: RunStatus, speeds: Sequence[float] = (), proofs: bool = False) -> RenderableType:
    """The whole picture: headline, speed, ranks, incidents.

    speeds   steps per second, in their order
    proofs   show of each incident what was compared and found equal
    """
    parts: list[RenderableType] = [draw_headline(shown)]
    if speeds:
        speed = f"{speeds[-1]:.3g}, at most {max(speeds):.3g}"
        width = max(1, min(_CURVE, console.width - len(f"steps/s  {speed}")))
        parts.append(Text(f"steps/s {draw_sparkline(speeds, width)} {speed}"))
    if shown.ranks:
        parts.append(draw_ranks(console, shown))
    if shown.incidents:
        parts += [Text("\nincidents"), draw_incidents(console, shown.incidents)]
        parts += [Text("\nseconds of each phase"), draw_phases(console, shown.incidents)]
        last = shown.incidents[-1]
        parts += [
            Text(line) for line in (f"\nincident {last.id}, phase by phase", *draw_waterfall(last, console.width))
        ]
        for incident in shown.incidents:
            why = [incident.reason + pointer(incident.reason_kind)] if incident.reason else []
            parts += [Text(f"incident {incident.id}: {text}") for text in (*why, *sentences_of(incident, proofs))]
    return Group(*parts)


def draw_sparkline(values: Sequence[float], width: int = _CURVE) -> str:
    """The newest of some numbers as a curve in a line of text, from zero to the highest."""
    shown = values[-width:]
    highest = max(shown)
    return "".join(_BARS[round(value / highest * (len(_BARS) - 1))] if highest else _BARS[0] for value in shown)


def draw_headline(shown: RunStatus) -> Text:
    """State, generation and budgets, then what else a person must know."""
    facts = [f"generation {shown.generation}", counted(shown.world_size, "rank")]
    if not shown.has_ended:
        facts += [describe_standbys(shown), f"restarts left {shown.restarts_left}"]
    if shown.exit_code is not None:
        facts.append(f"exit code {shown.exit_code}")
    line = Text.assemble(
        f"run {shown.run_id} · ", (shown.state, STYLES.get(shown.state, "")), " · " + " · ".join(facts)
    )
    named = ", ".join(f"{number}: {name}" for number, name in enumerate(shown.nodes))
    why = pointer(shown.reason_kind if shown.reason_kind != shown.protection_kind else "")
    details = [
        shown.nodes and f"nodes {named}; this is {shown.node}" + (", whose agent leads" if shown.is_leading else ""),
        shown.away and describe_away(shown),
        shown.reason and f"{shown.reason}{why}",
        shown.resume and describe_resume(shown.resume),
        shown.checkpoint and describe_checkpoint(shown.checkpoint),
        shown.snapshot_step is not None
        and not shown.has_ended
        and f"snapshot in shared memory: step {shown.snapshot_step}",
        shown.protection != "on" and f"{describe_protection(shown.protection)}{pointer(shown.protection_kind)}",
        shown.cost and describe_cost(shown.cost),
        *(f"not proved: {name}" for name in shown.not_proved),
    ]
    return line.append("".join(f"\n{detail}" for detail in details if detail))


def describe_standbys(shown: RunStatus) -> str:
    """How many processes wait to replace a lost rank, and how they stand."""
    how = f" ({shown.standby_state})" if shown.standby_state else ""
    return counted(shown.standbys, "standby") + how if shown.standbys else f"no standby yet{how}"


def describe_away(shown: RunStatus) -> str:
    """Which ranks are away, and since when: "rank 1, 3 away since step 12, training goes on with 2 of 4 ranks"."""
    steps = {rank.step for rank in shown.ranks if rank.rank in shown.away}
    since = f" since step {', '.join(map(str, sorted(filter(None, steps))))}" if any(steps) else ""
    goes_on = "went" if shown.has_ended else "goes"
    rest = f"training {goes_on} on with {shown.world_size - len(shown.away)} of {counted(shown.world_size, 'rank')}"
    return f"rank {', '.join(map(str, shown.away))} away{since}, {rest}"


def describe_resume(resume: ResumeStatus) -> str:
    """From where the run has resumed, in a line."""
    if resume.outcome == "open":
        return f"resuming: {resume.reason}"
    if resume.outcome != "recovered":
        return "not resumed"
    took = "" if resume.total_s is None else f" in {resume.total_s:.1f} s"
    return f"resumed from step {resume.boundary}{took}" if resume.boundary else f"started anew: {resume.reason}"


def describe_checkpoint(checkpoint: CheckpointStatus) -> str:
    """The newest checkpoint in a line, or why there is none."""
    if not checkpoint.path or checkpoint.took_s is None:
        return f"no checkpoint of step {checkpoint.boundary} ({checkpoint.cause}): {checkpoint.reason}"
    rate = f", {format_bytes(checkpoint.bytes / checkpoint.took_s)}/s" if checkpoint.took_s > 0 else ""
    wrong = f"; {checkpoint.reason}" if checkpoint.reason else ""
    return (
        f"checkpoint of step {checkpoint.boundary} ({checkpoint.cause}): "
        f"{format_bytes(checkpoint.bytes)} in {checkpoint.took_s:.2f} s{rate}{wrong}"
    )


def draw_ranks(console: Console, shown: RunStatus) -> RenderableType:
    """One line a rank."""
    # Of several nodes the node is shown in place of the local rank, so that the table fits into 80 columns.
    first = ("node", "rank") if shown.nodes else ("rank", "local")
    numbers = (*first, "pid", "step", "last seen")
    columns = (*first, "pid", "state", "step", "phase", "last seen", "protection")
    since_update_s = 0.0 if shown.has_ended else max(0.0, time.time() - unix_s(shown.updated_at))
    rows = []
    for rank in shown.ranks:
        seen = "-" if rank.last_seen_s is None else f"{rank.last_seen_s + since_update_s:.1f} s"
        names = (rank.node, rank.rank) if shown.nodes else (rank.rank, rank.local_rank)
        cells = (*names, rank.pid, rank.state, rank.step, rank.phase)
        rows.append((*map(_cell, cells), seen, rank.protection))
    spare = [name for name in _SPARE["ranks"] if name in columns]
    return fitting_table(console, columns, rows, numbers, spare)


def draw_incidents(console: Console, incidents: tuple[IncidentStatus, ...]) -> RenderableType:
    """One line an incident: what happened and how it ended."""
    numbers = ("#", "boundary", "steps lost")
    columns = ("#", "kind", "ranks", "rung", "outcome", "boundary", "steps lost")
    rows = [
        (past.id, past.kind, ",".join(map(str, past.ranks)), past.rung, past.outcome, past.boundary, past.steps_lost)
        for past in incidents
    ]
    return fitting_table(console, columns, [[*map(_cell, row)] for row in rows], numbers, _SPARE["incidents"])


def draw_phases(console: Console, incidents: tuple[IncidentStatus, ...]) -> RenderableType:
    """One line an incident: its number, and the seconds of each phase; they add up to the total."""
    # A narrow first heading: with it the table fits into 80 columns.
    columns = ("#", *COLUMNS)
    rows = [(str(past.id), *(in_seconds(seconds_of(past).get(phase)) for phase in COLUMNS)) for past in incidents]
    return fitting_table(console, columns, rows, columns, _SPARE["phases"])


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


# The phases of one incident as bars in lines of text, each where it lay in time.


WIDTH = 40  # characters of the time axis
_BESIDE = len("transfer |") + len("| 1000.000 s")


def draw_waterfall(incident: IncidentStatus, columns: int = WIDTH + _BESIDE) -> list[str]:
    """One line a phase, all on one scale of time; none if no phase was reached.

    columns   characters of a line, at most
    """
    width = max(1, min(WIDTH, columns - _BESIDE))
    spans = spans_of(incident)
    first_s = min((start_s for _, start_s, _ in spans), default=0.0)
    last_s = max((end_s for _, _, end_s in spans), default=0.0)
    per_s = width / (last_s - first_s) if last_s > first_s else 0.0
    lines = []
    for phase, start_s, end_s in spans:
        before = min(int((start_s - first_s) * per_s), width - 1)
        length = max(1, round((end_s - first_s) * per_s) - before)
        lines.append(
            f"{phase:>8} |{' ' * before}{'=' * length}{' ' * (width - before - length)}| {end_s - start_s:.3f} s"
        )
    return lines


REFRESH_S = 0.5
EXIT_CODES = {"starting": 0, "healthy": 0, "done": 0, "stopped": 0, "recovering": 1, "restarting": 1, "failed": 2}


def status(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line, for programs.")] = False,
    proofs: Annotated[bool, typer.Option("--proofs", help="Show what of each replacement was found equal.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json, of no run.")] = False,
) -> int:
    """Show a run's ranks and its incidents, with the seconds of each phase.

    Words such as generation, rung, boundary and standby are explained in 'ttprun guide glossary'.

    Exit code: 0 healthy, done, or stopped by Ctrl-C or another signal (or starting), 1 recovering, 2 failed.
    """
    if schema:
        print(json.dumps(TypeAdapter(RunStatus).json_schema(), indent=2))
        return 0
    view = RunView(RunDirectory.find(run))
    if not watch:
        print_status(view, as_json, proofs)
    elif sys.stdout.isatty() and not as_json:
        watch_on_terminal(view, proofs)
    else:
        for _ in changes(view):
            print_status(view, as_json, proofs)
    return EXIT_CODES[view.status.state]


def changes(view: RunView) -> Iterator[RunStatus]:
    """Yield the status, then again whenever more than steps and times has changed, until the run has ended."""
    shown = view.status
    yield shown
    while not shown.has_ended:
        time.sleep(REFRESH_S)
        view.look(always=True)
        if _gist(view.status) != _gist(shown):
            shown = view.status
            yield shown


def watch_on_terminal(view: RunView, proofs: bool) -> None:
    """Keep one picture up to date until the run has ended."""
    from rich.live import Live

    from ttprun.cli.terminal import open_console

    console = open_console()
    with Live(draw(console, view.status, speeds(view), proofs), console=console, auto_refresh=False) as live:
        while not view.status.has_ended:
            time.sleep(REFRESH_S)
            view.look(always=True)
            live.update(draw(console, view.status, speeds(view), proofs), refresh=True)


def speeds(view: RunView) -> list[float]:
    """Steps per second between the moments that the history of this launch knows, after the first step."""
    return [
        max(0, after.step - before.step) / (after.unix_s - before.unix_s)
        for before, after in pairwise(point for point in view.history if point.step)
        if after.unix_s > before.unix_s
    ]


def print_status(view: RunView, as_json: bool, proofs: bool = False) -> None:
    """Print one status; at once, also into a pipe.

    as_json     one line of JSON for programs, instead of a picture for people
    proofs      as for `draw`
    """
    if as_json:
        print(view.status.to_json(), flush=True)
        return
    from ttprun.cli.terminal import open_console

    console = open_console()
    console.print(draw(console, view.status, speeds(view), proofs))
    console.file.flush()


def _gist(shown: RunStatus) -> tuple[object, ...]:
    return (
        shown.state,
        shown.generation,
        shown.incidents,
        shown.protection,
        shown.away,
        *(rank.pid for rank in shown.ranks),
    )


# `ttprun topology`: which ranks hold the same, and what the loss of each would cost.


_MOST = 8  # ranks or names in a line


_LOSSES = {
    "peer": "replaced, no step lost",
    "buddy": "replaced from its mirror, no step lost",
    "snapshot": "all ranks go back to the newest snapshot",
    "checkpoint": "all ranks resume from the newest checkpoint",
    "restart": "all ranks start again",
}


def topology(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
    if_lost: Annotated[int | None, typer.Option(help="Show only what would be done if this rank were lost.")] = None,
) -> int:
    """Show which ranks hold the same weights and optimizer state, and from where a lost rank would get its own.

    Coordinates are those in the script's device meshes. Without a mesh they are those in its process groups: ep, cp
    and pp if what the ranks send each other shows experts, context or a pipeline. Who holds the same was compared by
    digests in the first steps, not assumed.
    """
    directory = RunDirectory.find(run)
    try:
        shown = read_topology(directory.topology)
    except FileNotFoundError:
        why = f"the ranks of the run in '{directory.path}' have not been compared yet"
        raise ConfigError(why, "this happens in the first two steps; try again then") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the topology cannot be read ({error})", "name another run") from None
    if if_lost is not None and not 0 <= if_lost < len(shown.ranks):
        raise ConfigError(f"the run has no rank {if_lost}", f"it has ranks 0 to {len(shown.ranks) - 1}")
    if if_lost is not None:
        shown = replace(shown, ranks=shown.ranks[if_lost : if_lost + 1])
    if as_json:
        print(shown.to_json(), flush=True)
    elif if_lost is not None:
        print(_loss_in_words(shown.ranks[0]), flush=True)
    else:
        _show_topology(shown)
    return 0


def _loss_in_words(rank: RankTopology) -> str:
    return (
        f"rank {rank.rank}: {_LOSSES[rank.loss]}"
        + ("" if rank.source in (None, rank.rank) else f", from rank {rank.source}")
        + (f" ({rank.why})" if rank.why else "")
    )


def _show_topology(shown: Topology) -> None:
    from ttprun.cli.terminal import new_table, open_console

    console = open_console()
    for name, members in shown.groups.items():
        console.print(f"{name} = {{{', '.join(map(str, members))}}}")
    dimensions = list(dict.fromkeys(name for rank in shown.ranks for name in rank.coordinates))
    mirror = ("mirror",) if any(rank.mirror_bytes for rank in shown.ranks) else ()
    numbers = ("rank", *dimensions, *mirror)
    table = new_table(console, "rank", *dimensions, "replica peers", *mirror, "if it is lost", right=numbers)
    for rank in shown.ranks:
        coordinates = [str(rank.coordinates.get(name, "-")) for name in dimensions]
        peers = in_short([*map(str, shown.peers(rank.rank))], _MOST) or "-"
        size = [in_words(rank.mirror_bytes) if rank.mirror_bytes else "-"] if mirror else []
        table.add_row(str(rank.rank), *coordinates, peers, *size, _LOSSES[rank.loss])
    console.print(table)
    if not shown.unequal:
        console.print(f"all ranks hold the same (compared at step {shown.boundary})")
        return
    unequal = in_short(shown.unequal, _MOST)
    console.print(f"not the same in all ranks (compared at step {shown.boundary}): {unequal}")
    for part in shown.parts:
        holders = " | ".join(in_short([*map(str, ranks)], _MOST) for ranks in part.holders[:_MOST])
        more = f" and {len(part.holders) - _MOST} more parts" if len(part.holders) > _MOST else ""
        console.print(f"parts held by ranks {holders}{more}: {in_short(part.names, _MOST)}")
    if any(rank.loss in ("snapshot", "restart") for rank in shown.ranks):
        console.print(
            "A shard with one holder is gone with its rank. A mesh of 2 replicas (HSDP, tensor x data parallel) "
            "gives each a second holder; --snapshot-every says how many steps are lost otherwise."
        )


# `ttprun report`: a run as one HTML file or as Markdown.


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
    from ttprun.web.page import as_html, as_markdown

    recorded = RunView(RunDirectory.find(run))
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
