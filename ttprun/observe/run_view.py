"""What a run's files say, read on and added up: its state in one sentence, its speed, where its time went.

`ttprun status`, the page, the report and the metrics all show it. Time is productive between two points of the history
if the job went beyond every step that it had reached before. Begin with `RunView.look`, and with `summarize`, which is
pure.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ttprun.errors import ConfigError, counted
from ttprun.observe.events import Point, read_history, read_on, spans_of, unix_s
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import IncidentStatus, RunStatus, describe_protection, read_status, stragglers_of

Event = Mapping[str, Any]
_RECENT_S = 60.0
_EVENTS = 20_000  # of the log, the newest
_SPANS = 50  # incidents whose phases are drawn
REASONS = {
    "startup": "from the launch to the first step",
    "recovery": "incidents, from the loss to the next step",
    "restart": "all ranks start again, or resume from a checkpoint",
    "again": "steps run again that were lost",
    "end": "after the last step",
}


@dataclass(frozen=True)
class Interval:
    """Seconds (unix time) in which the job did not train, and why: a word of REASONS."""

    start_s: float
    end_s: float
    reason: str

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """How much of it lies between two moments."""
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s))


@dataclass(frozen=True)
class Summary:
    """What people want to know first.

    sentence      how the job stands
    steps_per_s   over the last minute of training; null if nothing is known yet
    wall_s        from the launch to now, or to the end
    productive_s  of it, time in which steps were done for the first time
    lost_s        seconds by reason (REASONS); what is neither is the step that is under way
    usual_busy    the median of the ranks' `busy`; null if too little was seen
    stragglers    ranks for which the others wait: their `busy` is much higher; the slowest first
    spans         incident -> (phase, beginning, end) of each phase that it has reached, in seconds since the loss
    """

    sentence: str
    steps_per_s: float | None
    wall_s: float
    productive_s: float
    lost_s: dict[str, float]
    usual_busy: float | None = None
    stragglers: tuple[int, ...] = ()
    spans: dict[int, list[tuple[str, float, float]]] = field(default_factory=dict)


def summarize(status: RunStatus, history: Sequence[Point], events: Iterable[Event]) -> Summary:
    """Sum a run up.

    history   since the launch
    events    of this launch, "incident" and "resume" at least
    """
    started_s, now_s = unix_s(status.started_at), unix_s(status.updated_at)
    pauses = pauses_of(events, now_s)
    productive_s, lost_s = _account(started_s, now_s, history, pauses, status.has_ended)
    rate = recent_rate(history, pauses)
    stragglers, usual_busy = stragglers_of(status)
    return Summary(
        sentence=sentence_of(status, rate),
        steps_per_s=rate,
        wall_s=max(0.0, now_s - started_s),
        productive_s=productive_s,
        lost_s=lost_s,
        usual_busy=usual_busy,
        stragglers=stragglers,
        spans={incident.id: spans_of(incident) for incident in status.incidents[-_SPANS:]},
    )


def pauses_of(events: Iterable[Event], now_s: float) -> list[Interval]:
    """When incidents and resumes held the job up; one that is still open ends now."""
    opened: dict[tuple[str, object], float] = {}
    pauses = []
    for event in events:
        if event["event"] not in ("incident", "resume"):
            continue
        key = (event["event"], event.get("id"))
        at_s = unix_s(event["at"])
        # Noted when it was decided, some time after the loss.
        began_s = at_s - max(0.0, event.get("at_s", 0.0) - event.get("opened_at_s", event.get("at_s", 0.0)))
        opened.setdefault(key, began_s)
        if event["outcome"] != "open":
            pauses.append(Interval(opened.pop(key), at_s, "recovery" if key[0] == "incident" else "restart"))
    pauses += [
        Interval(began_s, now_s, "recovery" if key[0] == "incident" else "restart") for key, began_s in opened.items()
    ]
    return sorted(pauses, key=lambda pause: pause.start_s)


def recent_rate(history: Sequence[Point], pauses: Sequence[Interval]) -> float | None:
    """Steps per second of training over the last minute of the history, without the pauses; None if not known."""
    trained = [point for point in history if point.step]  # before the first step lies the start
    if len(trained) < 2:
        return None
    last = trained[-1]
    first = next(point for point in trained if point.unix_s >= last.unix_s - _RECENT_S)
    if first is last:
        first = trained[-2]
    spent_s = last.unix_s - first.unix_s - sum(pause.overlap_s(first.unix_s, last.unix_s) for pause in pauses)
    done = last.step - first.step
    return done / spent_s if done > 0 and spent_s > 0 else None


def _account(
    started_s: float, now_s: float, history: Sequence[Point], pauses: Sequence[Interval], has_ended: bool
) -> tuple[float, dict[str, float]]:
    """Where the time between two moments went: productive seconds, and others by reason."""
    lost = dict.fromkeys(REASONS, 0.0)
    productive_s = 0.0
    reached, before = 0, Point(started_s, 0)
    for point in [*history, None]:
        until_s = max(before.unix_s, now_s) if point is None else point.unix_s
        spent_s = until_s - before.unix_s
        for pause in pauses:
            paused_s = pause.overlap_s(before.unix_s, until_s)
            lost[pause.reason] += paused_s
            spent_s -= paused_s
        reason = ""
        if not reached:
            reason = "startup"
        elif point is None:
            reason = "end" if has_ended else ""  # else a step is under way
        elif point.step <= reached:
            reason = "restart" if point.step < before.step else "again"
        else:
            productive_s += max(0.0, spent_s)
        if reason:
            lost[reason] += max(0.0, spent_s)
        if point is not None:
            reached, before = max(reached, point.step), point
    return productive_s, lost


def sentence_of(status: RunStatus, rate: float | None) -> str:
    """How the job stands, for people."""
    ranks = counted(status.world_size, "rank")
    speed = f", {describe_rate(rate)}" if rate is not None else ""
    because = f": {status.reason}" if status.reason else ""
    match status.state:
        case "starting":
            return f"Starting {ranks}{because}."
        case "healthy":
            away = f", without {len(status.away)} of them" if status.away else ""
            return f"Training on {ranks}{away}: step {status.step}{speed}{because}. {_protection(status)}"
        case "recovering" | "restarting":
            doing = "Recovering" if status.state == "recovering" else "All ranks start again"
            incident = status.incidents[-1] if status.incidents else None
            why = f": {incident.reason}" if incident is not None and incident.reason else because
            return f"{doing}{why}."
        case "done":
            return f"Done after step {status.step} on {ranks}{_incidents(status.incidents)}."
        case "stopped":
            return f"Stopped at step {status.step}{because}."
        case "failed":
            code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
            return f"Failed{code} at step {status.step}{because}."


def describe_rate(rate: float) -> str:
    """Steps per second, or seconds per step if that is more than one."""
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s a step"


def _protection(status: RunStatus) -> str:
    if status.protection == "on":
        return "A lost rank is replaced without losing a step."
    said = describe_protection(status.protection)
    return f"{said[0].upper()}{said[1:]}."


def _incidents(incidents: Sequence[IncidentStatus]) -> str:
    if not incidents:
        return ", without an incident"
    lost = sum(incident.steps_lost or 0 for incident in incidents)
    return f", with {counted(len(incidents), 'incident')}, {lost} steps lost"


def sentences_of(incident: IncidentStatus, proofs: bool = True) -> list[str]:
    """What is said of an incident beside its reason: its standby, what was found equal, what is not proved."""
    sentences = {
        None: [],
        True: ["a standby was ready"],
        False: ["no standby was ready: the new process imported torch first"],
    }[incident.had_standby]
    if incident.setup_s:
        sentences.append(f"of the replay the script's own set-up took {in_seconds(incident.setup_s)} s")
    if incident.first_step_s is not None:
        sentences.append(f"{in_seconds(incident.first_step_s)} s after it all ranks had completed a step")
    sentences += [f"equal: {noun}" for noun in incident.equal] if proofs else []
    return sentences + [f"not proved: {sentence}" for sentence in incident.not_proved]


def in_seconds(value: float | None) -> str:
    """Milliseconds matter below ten seconds only, and columns are narrow; "-": not known."""
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def load(directory: RunDirectory) -> RunStatus:
    """Read the status of a run. Raises ConfigError if it has none."""
    try:
        return read_status(directory.status)
    except FileNotFoundError:
        raise ConfigError(f"the run in '{directory.path}' has not written a status", "look again in a second") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"status cannot be read ({error})", "name another run") from None


@dataclass(frozen=True)
class Line:
    """One line of the event log; `end` is where it ends in the file, its number for who comes again."""

    end: int
    text: str
    event: dict[str, Any]


class RunView:
    """What a run has written so far. Raises ConfigError if that is no status yet.

    lines      the event log of this launch, as far as it is kept
    incidents  of these, "incident" and "resume", all of them
    history    of this launch
    topology_json  who holds what, or "null"
    """

    status: RunStatus
    summary: Summary
    history: list[Point]

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.lines: deque[Line] = deque(maxlen=_EVENTS)
        self.incidents: list[dict[str, Any]] = []
        self.topology_json = "null"
        self._seen = self._stamps
        self._read_to = 0
        self._read()

    def look(self, always: bool = False) -> bool:
        """Read what is new; returns whether anything is. Raises ConfigError if the status cannot be read.

        always   read it though no file has changed: a launcher that was killed writes no more, and its run has ended
        """
        if self._stamps == self._seen and not always:
            return False
        self._seen = self._stamps
        self._read()
        return True

    @property
    def settings(self) -> str:
        """The resolved configuration; "" if it is gone."""
        with suppress(OSError):
            return self.run.config.read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def _stamps(self) -> tuple[object, ...]:
        return tuple(map(_stamp, (self.run.status, self.run.events, self.run.history)))

    def _read(self) -> None:
        self.status = load(self.run)
        started_s = unix_s(self.status.started_at)
        self._read_events(started_s)
        self.history = read_history(self.run.history, started_s)
        self.summary = summarize(self.status, self.history, self.incidents)
        with suppress(OSError):
            self.topology_json = self.run.topology.read_text(encoding="utf-8").strip() or "null"

    def _read_events(self, started_s: float) -> None:
        """Take the lines that were added; the last one may still be written."""
        for end, raw in read_on(self.run.events, self._read_to):
            self._read_to = end
            text = raw.decode(errors="replace").strip()
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(text)
                if unix_s(event["at"]) < started_s:
                    continue  # of an earlier launch in the same directory
                self.lines.append(Line(end, text, event))
                if event["event"] in ("incident", "resume"):
                    self.incidents.append(event)


def _stamp(path: os.PathLike[str]) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    return None
