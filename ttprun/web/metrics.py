"""The run in Prometheus' terms: base units, few labels. Made from what the run has written whenever somebody asks.

Names and what they mean are in `ttprun guide monitoring`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ttprun import __version__
from ttprun.observe.events import COLUMNS, seconds_of, unix_s
from ttprun.observe.run_view import RunView, Summary
from ttprun.observe.status import RunStatus

STATES = ("starting", "healthy", "recovering", "restarting", "done", "stopped", "failed")
RANK_STATES = ("starting", "running", "replaying", "repairing", "lost", "finished", "away")
_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


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


class RunCollector(Collector):
    """Collects the metrics of one run.

    view        returns what is known of it; None if that is nothing yet
    step_times  since the page is served
    """

    def __init__(self, view: Callable[[], RunView | None], step_times: StepTimes) -> None:
        self._view, self._step_times = view, step_times

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before the run has a status."""
        view = self._view()
        if view is None:
            return
        yield from _of_run(view.status)
        yield from _of_time(view.status, view.summary)
        yield from _of_incidents(view.status)
        yield from _of_saved_state(view.status)
        yield HistogramMetricFamily(
            "ttprun_step_duration_seconds",
            "Time of an optimizer step, as the mean of those between two looks (half a second)",
            buckets=self._step_times.histogram.buckets(),
            sum_value=self._step_times.histogram.sum,
        )


def _of_run(status: RunStatus) -> Iterator[Metric]:
    yield _by(GaugeMetricFamily, "ttprun_info", "The run", ("run_id", "version"), {(status.run_id, __version__): 1})
    yield _one_of("ttprun_state", "How the job stands: 1 for its state", "state", STATES, {status.state: 1})
    counts = Counter(rank.state for rank in status.ranks)
    yield _one_of("ttprun_ranks", "Ranks by what they do", "state", RANK_STATES, counts)
    lost, size = len(status.lost_nodes), max(1, len(status.nodes))
    nodes = {"training": size - lost, "lost": lost, "spare": len(status.spares), "quarantined": len(status.quarantine)}
    yield _one_of("ttprun_nodes", "Nodes by how they stand", "state", tuple(nodes), nodes)
    protections = Counter(rank.protection for rank in status.ranks)
    words = ("on", "not yet", "off")
    yield _one_of("ttprun_ranks_protected", "Ranks by whether a loss is repaired", "protection", words, protections)
    yield from _gauges(
        ("ttprun_protected", "1 if any lost rank is replaced and no step is lost", int(status.protection == "on")),
        ("ttprun_world_size", "Ranks that the job has", status.world_size),
        ("ttprun_generation", "Number of the communicator set", status.generation),
        ("ttprun_standbys_ready", "Processes that stand ready on this node", status.standbys),
        ("ttprun_restarts_left", "Restarts of all ranks that may still happen", status.restarts_left),
        ("ttprun_not_proved", "Variables that can change and are in no record", len(status.not_proved)),
        (
            "ttprun_status_time_seconds",
            "When the launcher has written the status (Unix time)",
            unix_s(status.updated_at),
        ),
        ("ttprun_start_time_seconds", "When the launcher has started (Unix time)", unix_s(status.started_at)),
    )


def _of_time(status: RunStatus, summary: Summary) -> Iterator[Metric]:
    yield GaugeMetricFamily("ttprun_step", "Optimizer steps that are done", value=status.step)
    if status.cost is not None:
        yield GaugeMetricFamily("ttprun_step_seconds", "From one optimizer step to the next", value=status.cost.step_s)
        what = "What protection takes of a step"
        yield _by(GaugeMetricFamily, "ttprun_overhead_seconds", what, ("part",), status.cost.parts)
    yield GaugeMetricFamily("ttprun_stragglers", "Ranks for which the others wait", value=len(summary.stragglers))
    if not status.is_leading:
        return  # when incidents went on is in the log of the node whose agent leads
    yield CounterMetricFamily(
        "ttprun_productive_seconds", "Time in which steps were done for the first time", value=summary.productive_s
    )
    what = "Time that brought no new step"
    yield _by(CounterMetricFamily, "ttprun_unproductive_seconds", what, ("reason",), summary.lost_s)


def _of_incidents(status: RunStatus) -> Iterator[Metric]:
    counts = Counter(
        (incident.kind, incident.rung or "none", incident.outcome)
        for incident in status.incidents
        if incident.outcome != "open"
    )
    yield _by(CounterMetricFamily, "ttprun_incidents", "Incidents", ("kind", "rung", "outcome"), counts)
    yield GaugeMetricFamily(
        "ttprun_incidents_open",
        "Incidents that go on",
        value=sum(incident.outcome == "open" for incident in status.incidents),
    )
    lost = sum(incident.steps_lost or 0 for incident in status.incidents)
    yield CounterMetricFamily("ttprun_steps_lost", "Optimizer steps that had to be run again", value=lost)
    recovery = HistogramMetricFamily("ttprun_recovery_seconds", "Time of each phase of an incident", labels=("phase",))
    took = [seconds_of(incident) for incident in status.incidents if incident.outcome != "open"]
    for phase in COLUMNS:
        histogram = Histogram(_RECOVERY_S)
        for seconds in took:
            if phase in seconds:
                histogram.observe(seconds[phase])
        recovery.add_metric((phase,), histogram.buckets(), histogram.sum)
    yield recovery


def _of_saved_state(status: RunStatus) -> Iterator[Metric]:
    yield from _gauges(("ttprun_snapshot_step", "Step of the newest snapshot", status.snapshot_step))
    if (checkpoint := status.checkpoint) is not None:
        is_valid = bool(checkpoint.path) and not checkpoint.reason
        yield from _gauges(
            ("ttprun_checkpoint_valid", "Whether the newest attempt gave one", int(is_valid)),
            ("ttprun_checkpoint_step", "Step of the newest checkpoint", checkpoint.boundary),
            ("ttprun_checkpoint_size_bytes", "Size of the newest checkpoint", checkpoint.bytes),
            ("ttprun_checkpoint_time_seconds", "When it was written (Unix time)", unix_s(checkpoint.written_at)),
            ("ttprun_checkpoint_duration_seconds", "How long that took", checkpoint.took_s),
        )


def _gauges(*rows: tuple[str, str, float | None]) -> Iterator[GaugeMetricFamily]:
    """Gauges by name, meaning and value; none for what is not known."""
    yield from (GaugeMetricFamily(name, what, value=value) for name, what, value in rows if value is not None)


def _one_of(name: str, what: str, label: str, values: Sequence[str], counts: dict[str, int] | Counter[str]) -> Metric:
    """A gauge for each value of a label, also for those that do not occur: a series must not come and go."""
    return _by(GaugeMetricFamily, name, what, (label,), {value: counts.get(value, 0) for value in values})


def _by(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    labels: Sequence[str],
    counts: Mapping[Any, float],
) -> Metric:
    """A metric with labels.

    counts   by the label's value, or the labels' values
    """
    family = kind(name, what, labels=labels)
    for values, count in counts.items():
        family.add_metric((values,) if isinstance(values, str) else values, count)
    return family
