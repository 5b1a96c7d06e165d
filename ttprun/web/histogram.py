"""How often what took how long: counts that only grow, as Prometheus wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttprun.observe.status import RunStatus
from ttprun.web.summary import unix_s

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
