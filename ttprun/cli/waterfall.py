"""The phases of one incident as bars in lines of text, each where it lay in time. Begin with `draw_waterfall`."""

from __future__ import annotations

from ttprun.observe.spans import spans_of
from ttprun.observe.status import IncidentStatus

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
