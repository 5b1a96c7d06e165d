"""Which fault came to what: each injection of a run's event log, paired with the incident that it caused.

Pure. Times are those of the machine's monotonic clock, which ranks and agent share. Begin with `pair`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ttprun.faults import WITHOUT_INCIDENT

# What a fault without an incident comes to.
EFFECTS = {
    "standby-kill": "another standby was started",
    "slow": "training went on, slower",
    "leave": "the rank left",
    "agent-kill": "the run ended",
}
# A fault that only delays a rank comes to nothing if it is over before anybody is missed.
PASSING = ("stop", "sleep", "deadlock", "busy", "silent", "cut-off")
# Whom the incident of a broken link names is not known beforehand: either end may be the one that is missed.
_OF_LINKS = ("reset", "silent", "cut-off")


@dataclass(frozen=True)
class Injection:
    """One fault and what it came to.

    phase, step  where it struck; None for a signal from outside
    at_s         monotonic
    failure      why it was not caused, "" if it was
    effect       what it came to, in words, where that is no incident of its own
    incident     number of the incident that it opened, or into which it fell
    detect_s     from the strike until the agent knew
    recover_s    from the incident's first death to its end
    """

    number: int | None
    fault: str
    kind: str
    rank: int | None
    phase: str | None = None
    step: int | None = None
    at_s: float | None = None
    failure: str = ""
    effect: str = ""
    incident: int | None = None
    rung: str | None = None
    outcome: str | None = None
    detect_s: float | None = None
    recover_s: float | None = None

    @property
    def is_accounted_for(self) -> bool:
        """Whether it struck, and came to an incident or to what its kind comes to."""
        return not self.failure and (self.incident is not None or bool(self.effect))


def pair(events: Iterable[dict[str, Any]]) -> list[Injection]:
    """All injections of an event log, in their order, those that never struck at the end."""
    log = list(events)
    incidents = _last_of_each(log)
    losses = [
        event
        for event in log
        if event["event"] in ("rank_exited", "rank_faulted", "rank_killed") and event.get("code") != 0
    ]
    found: list[Injection] = []
    armed: dict[int, dict[str, Any]] = {}
    taken: set[int] = set()
    strikes = [event for event in log if event["event"] == "fault_injected"]
    for event in log:
        name = event["event"]
        if name == "fault_armed":
            armed[event["number"]] = event
        elif name == "fault_failed":
            armed.pop(event["number"], None)
            kind = event.get("kind") or str(event["fault"]).partition(":")[0]
            number, rank = event["number"], event["rank"]
            found.append(Injection(number, event["fault"], kind, rank, failure=event["reason"]))
        elif name == "fault_injected":
            armed.pop(event["number"], None)
            later = (other["at_s"] for other in strikes if other["at_s"] > event["at_s"])
            same_rank = (o["at_s"] for o in strikes if o["at_s"] > event["at_s"] and o["rank"] == event["rank"])
            until_s = min(later if event["kind"] in _OF_LINKS else same_rank, default=float("inf"))
            found.append(_follow(_injection(event), until_s, incidents, losses, taken))
    for event in armed.values():
        kind = str(event["fault"]).partition(":")[0]
        why = "its moment never came"
        found.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=why))
    return found


def _injection(event: dict[str, Any]) -> Injection:
    return Injection(
        event["number"], event["fault"], event["kind"], event["rank"], event["phase"], event["step"], event["at_s"]
    )


def _last_of_each(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest word on each incident."""
    newest: dict[int, dict[str, Any]] = {}
    for event in log:
        if event["event"] == "incident":
            newest[event["id"]] = event
    return list(newest.values())


def _follow(
    injection: Injection,
    until_s: float,
    incidents: list[dict[str, Any]],
    losses: list[dict[str, Any]],
    taken: set[int],
) -> Injection:
    """Find the incident: the first that lost this rank at or after the strike, or that was open when it struck.

    until_s   when the next fault struck that could be taken for this one
    """
    if injection.kind in WITHOUT_INCIDENT:
        return replace(injection, effect=EFFECTS[injection.kind])
    at_s = injection.at_s or 0.0
    for incident in incidents:
        opened_s = incident["opened_at_s"]
        ended_s = opened_s + (incident["total_s"] or 0.0)
        is_of_it = injection.rank in incident["ranks"] or injection.kind in _OF_LINKS
        is_after = at_s <= opened_s <= until_s and incident["id"] not in taken
        if is_of_it and (is_after or opened_s < at_s <= ended_s):
            taken.add(incident["id"])
            return replace(
                injection,
                incident=incident["id"],
                rung=incident["rung"],
                outcome=incident["outcome"],
                detect_s=_detected(injection, at_s, opened_s, losses),
                recover_s=incident["total_s"],
            )
    if injection.kind in PASSING and "seconds=" in injection.fault:
        return replace(injection, effect="it passed before anybody was missed")
    return injection


def _detected(injection: Injection, at_s: float, opened_s: float, losses: list[dict[str, Any]]) -> float | None:
    if opened_s >= at_s:
        return opened_s - at_s
    seen = [loss["at_s"] for loss in losses if loss["rank"] == injection.rank and loss.get("at_s", 0.0) >= at_s]
    return min(seen) - at_s if seen else None
