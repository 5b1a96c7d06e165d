"""What a run's files say, followed and added up: its state in one sentence, its speed, where its time went.

One reader serves all clients, however many there are. Time is productive between two points of the history if the job
went beyond every step that it had reached before. Begin with `Feed.look`, and with `summarize`, which is pure.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from ttprun.errors import counted
from ttprun.observe.events import Point, read_history, read_on, spans_of
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import IncidentStatus, RunStatus, describe_protection, read_status

Event = Mapping[str, Any]
_RECENT_S = 60.0
_SPANS = 50  # incidents whose phases are drawn
_MORE_BUSY = 0.2  # than the others: chance alone does not make it in so many looks
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
    busy = {rank.rank: rank.busy for rank in status.ranks if rank.busy is not None}
    usual_busy = median(busy.values()) if len(busy) > 1 else None
    slow = [rank for rank in busy if usual_busy is not None and busy[rank] > usual_busy + _MORE_BUSY]
    slow.sort(key=busy.__getitem__, reverse=True)
    return Summary(
        sentence=sentence_of(status, rate),
        steps_per_s=rate,
        wall_s=max(0.0, now_s - started_s),
        productive_s=productive_s,
        lost_s=lost_s,
        usual_busy=usual_busy,
        stragglers=tuple(slow),
        spans={incident.id: spans_of(incident) for incident in status.incidents[-_SPANS:]},
    )


def unix_s(at: str) -> float:
    """Seconds since 1970 of a time in the status or the event log."""
    return datetime.fromisoformat(at).timestamp()


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


# How often what took how long: counts that only grow, as Prometheus wants them.


_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """Counts of values up to each bound.

    bounds   seconds, rising
    """

    bounds: Sequence[float]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, in seconds."""
        self.sum += value * times
        self.counts[sum(bound < value for bound in self.bounds)] += times

    def buckets(self) -> list[tuple[str, float]]:
        """As the text format wants them: each holds those before it."""
        names = [*map(str, self.bounds), "+Inf"]
        return [(name, sum(self.counts[: number + 1])) for number, name in enumerate(names)]


class StepTimes:
    """How long steps take, as seen from outside: the mean of the steps between two looks at the status."""

    def __init__(self) -> None:
        self.histogram = Histogram(_STEP_S)
        self._before: tuple[float, int] | None = None

    def note(self, status: RunStatus) -> None:
        """A status has been read. What an incident holds up is no step's time."""
        at_s, step = unix_s(status.updated_at), status.step
        if status.state != "healthy" or self._before is None or step < self._before[1]:
            self._before = (at_s, step) if status.state == "healthy" else None
            return
        done = step - self._before[1]
        if done and self._before[1]:  # the first steps hold the start
            self.histogram.observe((at_s - self._before[0]) / done, done)
        if done:
            self._before = (at_s, step)


EVERY_S = 0.5
_SHARE = 20  # a look takes at most a part of the time: for thousands of ranks it comes less often
_EVENTS = 5_000  # the newest, which a page that is opened later gets


@dataclass(frozen=True)
class Line:
    """One line of the event log; `end` is where it ends in the file, its number for who comes again."""

    end: int
    text: str
    event: dict[str, Any]


class Feed:
    """What a run has written so far.

    status     None until the run has one
    lines      the event log of this launch, as far as it is kept
    incidents  of these, "incident" and "resume", all of them
    history    of this launch
    status_json    the status and what it comes to, made once for all pages; topology_json: who holds what, or "null"
    step_times of this launch, since the page is served
    changed    set, and replaced, whenever something is new
    over       set when nothing comes any more
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.status: RunStatus | None = None
        self.summary: Summary | None = None
        self.lines: deque[Line] = deque(maxlen=_EVENTS)
        self.incidents: list[dict[str, Any]] = []
        self.history: list[Point] = []
        self.status_json = ""
        self.topology_json = "null"
        self.step_times = StepTimes()
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        self._seen: tuple[object, ...] = ()
        self._read_to = 0

    async def follow(self) -> None:
        """Look at the files until it is over."""
        while not self.over.is_set():
            began_s = time.monotonic()
            self.look()
            await asyncio.sleep(max(EVERY_S, _SHARE * (time.monotonic() - began_s)))

    def end(self) -> None:
        """The launcher is about to end: what is in the files now is the last."""
        self.over.set()
        self.look()
        self._wake()

    def look(self) -> None:
        """Read what is new. Files that cannot be read, or are not there yet, are tried again at the next look."""
        seen = tuple(map(_stamp, (self.run.status, self.run.events, self.run.history)))
        if seen == self._seen and not self.over.is_set():
            return
        self._seen = seen
        with suppress(OSError, ValueError):
            self.status = read_status(self.run.status)
        if self.status is None:
            return
        self.step_times.note(self.status)
        started_s = unix_s(self.status.started_at)
        self._read_events(started_s)
        self.history = read_history(self.run.history, started_s)
        self.summary = summarize(self.status, self.history, self.incidents)
        self.status_json = f'{{"status": {self.status.to_json()}, "summary": {json.dumps(asdict(self.summary))}}}'
        with suppress(OSError):
            self.topology_json = self.run.topology.read_text(encoding="utf-8").strip() or "null"
        self._wake()

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

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _stamp(path: os.PathLike[str]) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    return None
