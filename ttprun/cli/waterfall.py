"""The phases of one incident as bars in lines of text, each where it lay in time. Begin with `draw_waterfall`."""

from __future__ import annotations

from ttprun.observe.spans import spans_of
from ttprun.observe.status import IncidentStatus

WIDTH = 40  # characters of the time axis


def draw_waterfall(incident: IncidentStatus) -> list[str]:
    """One line a phase; none if no phase was reached."""
    spans = spans_of(incident)
    first_s = min((start_s for _, start_s, _ in spans), default=0.0)
    last_s = max((end_s for _, _, end_s in spans), default=0.0)
    per_s = WIDTH / (last_s - first_s) if last_s > first_s else 0.0
    lines = []
    for phase, start_s, end_s in spans:
        before = min(int((start_s - first_s) * per_s), WIDTH - 1)
        length = max(1, round((end_s - first_s) * per_s) - before)
        lines.append(
            f"{phase:>8} |{' ' * before}{'=' * length}{' ' * (WIDTH - before - length)}| {end_s - start_s:.3f} s"
        )
    return lines
