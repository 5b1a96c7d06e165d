"""The phases of one incident as bars in lines of text, each where it lay in time. Begin with `draw_waterfall`."""

from __future__ import annotations

from ttprun.observe.status import IncidentStatus

WIDTH = 40  # characters of the time axis
_IN_ORDER = ("transfer", "rebuild", "reissue")  # each begins when the one before it ends


def spans_of(incident: IncidentStatus) -> list[tuple[str, float, float]]:
    """(phase, beginning, end) of each phase that was reached, in seconds since the loss was noticed.

    The replacement is started while the others freeze; its replay ends when both are done.
    """
    spans: list[tuple[str, float, float]] = []
    frozen_s, started_s = incident.freeze_s or 0.0, incident.spawn_s or 0.0
    end_s = frozen_s
    if incident.detect_s is not None:
        spans.append(("detect", -incident.detect_s, 0.0))
    if incident.freeze_s is not None:
        spans.append(("freeze", 0.0, frozen_s))
    if incident.spawn_s is not None:
        spans.append(("spawn", 0.0, started_s))
    if incident.replay_s is not None:
        end_s = frozen_s + incident.replay_s
        spans.append(("replay", min(max(frozen_s, started_s), end_s), end_s))
    for phase in _IN_ORDER:
        took_s = getattr(incident, f"{phase}_s")
        if took_s is not None:
            spans.append((phase, end_s, end_s + took_s))
            end_s += took_s
    return spans


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
