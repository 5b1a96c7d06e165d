"""The run in Prometheus' terms: base units, few labels. Made from the feed whenever somebody asks.

Names and what they mean are in `ttprun guide monitoring`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ttprun import __version__
from ttprun.observe.events import COLUMNS, seconds_of
from ttprun.observe.status import RunStatus
from ttprun.web.feed import Feed, Histogram, Summary, unix_s

STATES = ("starting", "healthy", "recovering", "restarting", "done", "stopped", "failed")
RANK_STATES = ("starting", "running", "replaying", "repairing", "lost", "finished", "away")
_RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class RunCollector(Collector):
    """Collects the metrics of one run."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before the run has a status."""
        status, summary = self._feed.status, self._feed.summary
        if status is None or summary is None:
            return
        yield from _of_run(status)
        yield from _of_time(status, summary)
        yield from _of_incidents(status)
        yield from _of_saved_state(status)
        yield HistogramMetricFamily(
            "ttprun_step_duration_seconds",
            "Time of an optimizer step, as the mean of those between two looks (half a second)",
            buckets=self._feed.step_times.histogram.buckets(),
            sum_value=self._feed.step_times.histogram.sum,
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
