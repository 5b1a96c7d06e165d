"""When each phase of an incident went on: what the page, reports and `ttprun status` draw. Begin with `spans_of`."""

from __future__ import annotations

from ttprun.observe.status import IncidentStatus

PHASES = ("detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue")
COLUMNS = (*PHASES, "total")  # of a table of phases
_IN_ORDER = ("replay", "transfer", "rebuild", "reissue")  # each begins when the one before it ends


def spans_of(incident: IncidentStatus) -> list[tuple[str, float, float]]:
    """(phase, beginning, end) of each phase that was reached, in seconds since the loss was noticed.

    They follow one another. The replacement is started while the others freeze: "spawn" is what is left of its start
    when they have.
    """
    spans: list[tuple[str, float, float]] = []
    end_s = incident.freeze_s or 0.0
    if incident.detect_s is not None:
        spans.append(("detect", -incident.detect_s, 0.0))
    if incident.freeze_s is not None:
        spans.append(("freeze", 0.0, end_s))
    if incident.spawn_s is not None:
        started_s = max(end_s, incident.spawn_s)
        spans.append(("spawn", end_s, started_s))
        end_s = started_s
    for phase in _IN_ORDER:
        took_s = getattr(incident, f"{phase}_s")
        if took_s is not None:
            spans.append((phase, end_s, end_s + took_s))
            end_s += took_s
    return spans


def seconds_of(incident: IncidentStatus) -> dict[str, float]:
    """How long each phase that was reached took of the whole, and of one that has ended the "total"."""
    found = {phase: end_s - start_s for phase, start_s, end_s in spans_of(incident)}
    return found if incident.total_s is None else found | {"total": incident.total_s}
