"""When each phase of an incident went on: what the page, reports and `ttprun status` draw. Begin with `spans_of`."""

from __future__ import annotations

from ttprun.observe.status import IncidentStatus

PHASES = ("detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue")
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
