"""Which fault came to what: each injection of a run's event log, paired with the incident that it caused.

Pure. Times are those of the machine's monotonic clock, which ranks and agent share. Begin with `pair`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ttprun.chaos.faults import WITHOUT_INCIDENT

# What a fault without an incident comes to.
EFFECTS = {
    "standby-kill": "another standby was started",
    "stall": "the agent was late",
    "slow": "training went on, slower",
    "leave": "the rank left",
    "agent-kill": "the run ended",
    "preempt": "the run ended",
}
# A fault that only delays a rank has no effect if it is over before the rank is missed.
PASSING = ("stop", "sleep", "deadlock", "busy", "silent", "cut-off")
# Either end of a broken link may be the one that is missed.
_OF_LINKS = ("reset", "silent", "cut-off", "link")
# An incident is opened so soon, at most, after what opens it was written down.
_NEAR_S = 2.0


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
    found: list[Injection] = []
    armed: dict[int, dict[str, Any]] = {}
    for event in log:
        name = event["event"]
        if name == "fault_armed":
            armed[event["number"]] = event
        elif name == "fault_failed":
            armed.pop(event["number"], None)
            kind = event.get("kind") or str(event["fault"]).partition(":")[0]
            found.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=event["reason"]))
        elif name == "fault_injected":
            armed.pop(event["number"], None)
            found.append(_follow(event, log))
    for event in armed.values():
        kind = str(event["fault"]).partition(":")[0]
        failure = "its moment never came"
        found.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=failure))
    return found


def _follow(event: dict[str, Any], log: list[dict[str, Any]]) -> Injection:
    """What a strike came to: its process was lost or found to hang, a connection was found broken, or no incident."""
    kind, at_s = event["kind"], event["at_s"]
    struck = Injection(
        event["number"], event["fault"], kind, event["rank"], event["phase"], event["step"], event["at_s"]
    )
    if kind in WITHOUT_INCIDENT:
        return replace(struck, effect=EFFECTS[kind])
    after = [other for other in log if other.get("at_s", 0.0) >= at_s]
    noticed = _broken_link(event, after) if kind in _OF_LINKS else None
    if noticed is None:
        noticed = next((other for other in after if _is_loss(other) and other["pid"] == event["pid"]), None)
    if noticed is None and kind == "nan":
        named = (other for other in after if other["event"] == "nan_found" and other["rank"] in (event["rank"], None))
        noticed = next(named, None)
        effect = "" if noticed is None else f"reported in step {noticed['step']}; it reached the weights"
        return replace(struck, effect=effect, detect_s=None if noticed is None else noticed["at_s"] - at_s)
    incident = None if noticed is None else _incident_at(log, noticed)
    if noticed is None or incident is None:
        has_passed = kind in PASSING and "seconds=" in event["fault"]
        return replace(struck, effect="it ended before any rank was missed" if has_passed else "")
    return replace(
        struck,
        incident=incident["id"],
        rung=incident["rung"],
        outcome=incident["outcome"],
        detect_s=noticed["at_s"] - at_s,
        recover_s=incident["total_s"],
    )


def _is_loss(event: dict[str, Any]) -> bool:
    is_bad_exit = event["event"] == "rank_exited" and event["code"] != 0
    return is_bad_exit or event["event"] in ("rank_faulted", "rank_hung", "rank_killed")


def _broken_link(event: dict[str, Any], after: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first sign of trouble after a link was broken and before the next fault: either of its ends may show it."""
    for other in after:
        if other["event"] == "fault_injected" and other["number"] != event["number"]:
            return None
        if _is_loss(other) or other["event"] in ("connection_broken", "stalled"):
            return other
    return None


def _incident_at(log: Sequence[dict[str, Any]], noticed: dict[str, Any]) -> dict[str, Any] | None:
    """The last word on the incident that was open when something was noticed, or was opened by it."""
    newest: dict[int, dict[str, Any]] = {}
    for event in log:
        if event["event"] == "incident":
            newest[event["id"]] = event
    for incident in newest.values():
        ends_s = float("inf") if incident["outcome"] == "open" else incident["at_s"]
        if incident["opened_at_s"] - _NEAR_S <= noticed["at_s"] <= ends_s:
            return incident
    return None
