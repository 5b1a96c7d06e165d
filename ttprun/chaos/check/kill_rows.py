"""What each kill of a check came to: a row a kill, with the reason and the cure where it is not exact.

Begin with `rows_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from ttprun.chaos.check.notes import (
    AT_END,
    RunDifference,
    differences_by_step,
    differing_values,
    differing_variables,
)
from ttprun.chaos.check.trial import Trial
from ttprun.chaos.drill.compare import TWINS, Kinds, compare_runs, pair
from ttprun.chaos.faults import Fault
from ttprun.observe.status import IncidentStatus
from ttprun.protocol.reasons import says_cure, split_cure, with_cure

KillResult = Literal["exact", "by a weaker rung", "refused", "differs", "not reached", "not tried"]
WITHOUT_LOSS = ("reconnect", "rerun", "replace")
_PLACE = re.compile(r"[^\s'\"(),]+\.py:\d+")
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
_FINDINGS = r"rank \d+ is (?:refused|not proved|not protected)"
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
    rung = "a start from the beginning" if is_anew else incident.rung
    row = replace(
        _new(fault, "exact", ""),
        rung=rung,
        steps_lost=incident.steps_lost,
        took_s=incident.total_s,
        had_standby=incident.had_standby,
    )
    if _is_without_loss(incident):
        return row
    reason = trial.as_users(essence(incident.reason))
    is_over = incident.outcome not in ("recovered", "restarted")
    return _explained(replace(row, result="refused" if is_over else "by a weaker rung", detail=reason))


def _is_without_loss(incident: IncidentStatus) -> bool:
    return incident.outcome == "recovered" and incident.rung in WITHOUT_LOSS and not incident.steps_lost


def essence(reason: str) -> str:
    """Why a rank was not replaced, of an incident's reason: without the kill, and what became of the job then."""
    why = re.split(r"; (?:not replaced|not reconnected): ", reason)[-1]
    why = re.split(r"; (?:no restart is left|no other way|its state was saved|no checkpoint)", why)[0]
    mismatch = re.fullmatch(rf"(?:{_FINDINGS}) \((.*)\)", why, re.DOTALL)
    return mismatch[1] if mismatch else why


def refused(fault: Fault, result: KillResult, reason: str) -> KillOutcome:
    """A row for a kill that was not tried.

    result   "refused" or "not tried"
    reason   a sentence, from which the row's place and cure are taken
    """
    return _explained(_new(fault, result, reason))


def _new(fault: Fault, result: KillResult, detail: str) -> KillOutcome:
    return KillOutcome(fault.phase or "", fault.step or 0, fault.rank or 0, result, detail)


def _explained(row: KillOutcome) -> KillOutcome:
    """With the place that the reason names, and what to do."""
    place, (detail, cure) = _PLACE.search(row.detail), split_cure(with_cure(row.detail))
    return replace(row, detail=detail, place=place[0] if place else "", cure=cure or _cure_in(detail))


def _cure_in(reason: str) -> str:
    """What helps, where the reason itself says so."""
    return "as it says" if says_cure(reason) else _CURE_OTHERWISE


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


@dataclass(frozen=True)
class RunComparison:
    """How two runs of the same script compare.

    by_step   differences in what is trained, and in random numbers
    at_end    in variables, output and files
    """

    by_step: list[RunDifference]
    at_end: list[RunDifference]

    @property
    def all(self) -> list[RunDifference]:
        """All differences."""
        return [*self.by_step, *self.at_end]


def compare(disturbed: Trial, undisturbed: Trial) -> RunComparison:
    """Compare all that two trials have left; a run that was begun again has said and written things twice."""
    by_step = differences_by_step(disturbed.notes, undisturbed.notes)
    status = disturbed.twin.status
    is_whole = disturbed.twin.exit_code == 0 and status is not None
    if not is_whole or status is None or any(incident.rung not in WITHOUT_LOSS for incident in status.incidents):
        return RunComparison(by_step, [])
    variables = differing_variables(disturbed.notes, undisturbed.notes)
    at_end = [replace(difference, detail=undisturbed.as_users(difference.detail)) for difference in variables]
    return RunComparison(by_step, at_end + _compare_what_is_left(disturbed, undisturbed))


def compare_with_torchrun(trial: Trial, by_torchrun: Trial) -> list[RunDifference]:
    """Whatever an undisturbed trial has other than one under torchrun, the earliest first."""
    differences = differing_values(trial.notes, by_torchrun.notes)
    codes = trial.twin.exit_code, by_torchrun.twin.exit_code
    if codes[0] != codes[1]:
        return [*differences, RunDifference(AT_END, "the exit code", f"at the end: {codes[0]} instead of {codes[1]}")]
    return differences + _compare_what_is_left(trial, by_torchrun, ("ttprun", "torchrun"))


def unlike(differences: Iterable[RunDifference], by_itself: Iterable[RunDifference]) -> list[RunDifference]:
    """The differences that a script does not have by itself. Names may hold a time or a pid, other ones each time.

    differences   between two runs that are to be alike
    by_itself     between two runs of the same kind, without faults
    """
    names = {_NUMBER.sub("", difference.what) for difference in by_itself}
    return [difference for difference in differences if _NUMBER.sub("", difference.what) not in names]


def _compare_what_is_left(trial: Trial, other: Trial, kinds: Kinds = TWINS) -> list[RunDifference]:
    """How files and output differ."""
    names = sorted({*trial.changed, *other.changed})
    compared = compare_runs(names, (trial.kept, other.kept), (trial.twin.output, other.twin.output), kinds)
    return [
        RunDifference(AT_END, output.what if output.how == "lines" else f"file {output.what}", output.detail)
        for output in compared
        if not output.is_identical
    ]
