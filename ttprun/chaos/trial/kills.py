"""Which fault came to what, and what a check kills. Pure. Begin with `pair`, `plan` and `rows_of`.

A fault of a run's event log is paired with the incident that it caused. Times are those of the machine's monotonic
clock, which ranks and agent share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from ttprun.chaos.injected_faults import WITHOUT_INCIDENT, Fault
from ttprun.chaos.trial.compare import (
    AT_END,
    WITHOUT_LOSS,
    Moment,
    RunDifference,
    Trial,
)
from ttprun.observe.status import IncidentStatus
from ttprun.protocol.reason import Reason

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
    injections: list[Injection] = []
    armed: dict[int, dict[str, Any]] = {}
    for event in log:
        name = event["event"]
        if name == "fault_armed":
            armed[event["number"]] = event
        elif name == "fault_failed":
            armed.pop(event["number"], None)
            kind = event.get("kind") or str(event["fault"]).partition(":")[0]
            injections.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=event["reason"]))
        elif name == "fault_injected":
            armed.pop(event["number"], None)
            injections.append(_follow(event, log))
    for event in armed.values():
        kind = str(event["fault"]).partition(":")[0]
        failure = "its moment never came"
        injections.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=failure))
    return injections


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


# At which moments of a script a check kills a rank, by what its undisturbed run has come to.


STEPS = 16  # enough for one launch with a kill of each kind
FEWEST_STEPS = 3
# A survivor goes on to the next step until it meets the dead rank there, and never further: so no two kills overlap.
LEAST_GAP = 2
MOST_RANKS = 8
_RARE = 3  # steps with such a moment; what comes more often finds a place anyhow
_LATE = -1
# (phase, whether rank 0 is killed or another one, first step that will do; _LATE: the last that will)
WISHES: tuple[tuple[str, bool, int], ...] = (
    ("setup", False, 0),
    ("forward", True, 0),
    ("backward", False, 1),
    ("collective", True, 2),
    ("before_step", False, 3),
    ("in_step", True, 4),
    ("after_step", False, 5),
    ("backward", True, _LATE),
    ("validation", False, 1),
    ("checkpoint", True, 1),
)
_BETWEEN_STEPS = ("validation", "checkpoint")


def plan(seen: Mapping[int, set[Moment]], steps: int, ranks: Sequence[int]) -> tuple[list[list[Fault]], list[str]]:
    """The kills of each launch, in the order in which they strike, and the phases that no rank has come to.

    seen    rank -> the moments of its undisturbed run
    steps   after which the ranks leave; each kill leaves one step that follows
    ranks   to kill, each at least once, but only the first MOST_RANKS

    Kills share a launch if each is over before the next, so that a difference can be attributed to one kill.
    """
    launches: list[list[Fault]] = []
    first, others = ranks[0], [*ranks[1:MOST_RANKS]] or [ranks[0]]
    places = []
    for phase, is_first, earliest in WISHES:
        choices = [
            (phase, rank, _steps_of(phase, rank, earliest, seen, steps)) for rank in ([first] if is_first else others)
        ]
        place = next((choice for choice in choices if choice[2]), choices[0])
        places.append(place)
        if not is_first and place[2]:
            others.append(others.pop(others.index(place[1])))
    killed = {rank for _, rank, at in places if at}
    places += [("backward", rank, _steps_of("backward", rank, 1, seen, steps)) for rank in others if rank not in killed]
    for phase, rank, at in sorted(places, key=lambda place: min(len(place[2]), _RARE)):  # the rarest first
        kills = [Fault("kill", rank=rank, step=step, phase=phase) for step in at]
        kills = [kill for kill in kills if not any(kill in planned for planned in launches)]
        if kills:
            _put(kills, launches)
    for planned in launches:
        planned.sort(key=lambda fault: fault.step or 0)
    covered = {fault.phase for planned in launches for fault in planned}
    return launches, list(dict.fromkeys(phase for phase, _, _ in WISHES if phase not in covered))


def _steps_of(phase: str, rank: int, earliest: int, seen: Mapping[int, set[Moment]], steps: int) -> list[int]:
    """The steps that would do, the best first."""
    moments = seen.get(rank, set())
    last = steps - 1 if phase in _BETWEEN_STEPS else steps - 2
    return sorted((at for name, at in moments if name == phase and earliest <= at <= last), reverse=earliest == _LATE)


def _put(kills: list[Fault], launches: list[list[Fault]]) -> None:
    """Put the first of these that fits into a launch; if none does, into a new one."""
    for planned in launches:
        for kill in kills:
            if all(abs((kill.step or 0) - (other.step or 0)) >= LEAST_GAP for other in planned):
                planned.append(kill)
                return
    launches.append([kills[0]])


# What each kill of a check came to: a row a kill, with the reason and the cure where it is not exact.


KillResult = Literal["exact", "by a weaker rung", "refused", "differs", "not reached", "not tried"]
_PLACE = re.compile(r"[^\s'\"(),]+\.py:\d+")

_CURE_OTHERWISE = (
    "nothing is known to help: see 'Not covered' in 'ttprun guide limits'; --max-restarts N starts all ranks again, as "
    "under torchrun"
)


@dataclass(frozen=True)
class KillOutcome:
    """One kill.

    result   exact: replaced with no step lost, and all that was compared is the same
    detail   what it came to, a sentence; the reason where it is not exact
    place    file:line, or the variable, "" if the reason names none
    cure     what to do about it; "" if nothing is to be done
    had_standby   a standby was ready for the lost rank; None if none was needed
    """

    phase: str
    step: int
    rank: int
    result: KillResult
    detail: str
    rung: str | None = None
    steps_lost: int | None = None
    took_s: float | None = None
    place: str = ""
    cure: str = ""
    had_standby: bool | None = None


def rows_of(trial: Trial, faults: Sequence[Fault]) -> tuple[list[KillOutcome], list[Fault]]:
    """A row for each kill that struck, in order, and the kills that did not since the run ended before."""
    struck = {injection.fault: injection for injection in pair(trial.twin.events) if not injection.failure}
    incidents = trial.twin.status.incidents if trial.twin.status is not None else ()
    opened = {injection.incident for injection in struck.values()}
    rows, remaining = [], []
    for fault in faults:
        injection = struck.get(str(fault))
        if injection is None:
            remaining.append(fault)
            continue
        at = next((at for at, incident in enumerate(incidents) if incident.id == injection.incident), None)
        if at is None:
            rows.append(_new(fault, "refused", "the kill struck, and ttprun did not notice"))
            continue
        # What is found wrong soon after a repair is an incident of its own, which no kill has opened.
        later = takewhile(lambda incident: incident.id not in opened, incidents[at + 1 :])
        rows.append(_row(trial, fault, [incidents[at], *later]))
    return rows, remaining


def _row(trial: Trial, fault: Fault, incidents: list[IncidentStatus]) -> KillOutcome:
    """A row for a kill and what followed from it."""
    incident = next((candidate for candidate in incidents if not _is_without_loss(candidate)), incidents[0])
    is_anew = incident.rung == "rewind" and incident.boundary == 0
    row = replace(
        _new(fault, "exact", ""),
        rung="a start from the beginning" if is_anew else incident.rung,
        steps_lost=incident.steps_lost,
        took_s=incident.total_s,
        had_standby=incident.had_standby,
    )
    if _is_without_loss(incident):
        return row
    is_over = incident.outcome not in ("recovered", "restarted")
    reason = Reason(incident.reason_kind, trial.as_users(incident.why or incident.reason))
    return _explained(replace(row, result="refused" if is_over else "by a weaker rung"), reason)


def _is_without_loss(incident: IncidentStatus) -> bool:
    return incident.outcome == "recovered" and incident.rung in WITHOUT_LOSS and not incident.steps_lost


def refused(fault: Fault, result: KillResult, reason: Reason) -> KillOutcome:
    """A row for a kill that was not tried.

    result   "refused" or "not tried"
    reason   from which the row's place and cure are taken
    """
    return _explained(_new(fault, result, ""), reason)


def _new(fault: Fault, result: KillResult, detail: str) -> KillOutcome:
    return KillOutcome(fault.phase or "", fault.step or 0, fault.rank or 0, result, detail)


def _explained(row: KillOutcome, reason: Reason) -> KillOutcome:
    """With the reason, the place in the script that it names, and what to do."""
    place = _PLACE.search(reason.text)
    return replace(row, detail=reason.text, place=place[0] if place else "", cure=reason.cure or _CURE_OTHERWISE)


def blamed(rows: Sequence[KillOutcome], differences: Iterable[RunDifference]) -> list[KillOutcome]:
    """The rows, where what differs after a step is attributed to the last kill before it.

    rows         in the order of their steps
    differences  differences from the undisturbed run, each with the boundary at which it was seen first
    """
    changed = list(rows)
    for difference in differences:
        before = [at for at, row in enumerate(changed) if row.step < difference.boundary and row.result != "not tried"]
        if difference.boundary == AT_END or not before:
            continue
        row = changed[before[-1]]
        if row.result == "exact":  # else there is a better reason
            detail = f"{difference.what} differ from the undisturbed run's {difference.detail}"
            cure = "this is a bug of ttprun, or the script computes something else each time: please report it"
            changed[before[-1]] = replace(row, result="differs", detail=detail, cure=cure)
    return changed
