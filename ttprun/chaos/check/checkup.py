"""A whole check: the undisturbed run, the same under torchrun, the kills, what differs. Begin with `check_script`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttprun.capture.position import disk_cache
from ttprun.chaos.check.kill_rows import (
    KillOutcome,
    RunComparison,
    blamed,
    compare,
    compare_with_torchrun,
    refused,
    rows_of,
    unlike,
)
from ttprun.chaos.check.notes import AT_END, RunDifference
from ttprun.chaos.check.plan import WISHES, Moment, plan
from ttprun.chaos.check.trial import CheckTarget, Trial, Trials
from ttprun.chaos.faults import Fault
from ttprun.observe.topology import read_topology

MOST_ENDED = 2  # launches that a kill may end; the rest is not tried then
_TAIL_LINES = 12
_NOT_COMPARABLE = "the script is not reproducible by itself"


@dataclass
class CheckReport:
    """What a check has shown.

    rows           one a kill
    missed         phases that the script did not come to in these steps
    differences    at the end, where no single kill can be blamed
    by_itself      what differs between two undisturbed runs, and is not compared for that
    not_proved     what can change and is in no record
    late           calls in the undisturbed run in which a rank was missed by the others: a hang looks the same
    problem        why nothing could be checked, or not all; "" if all was
    tail           of the launcher's log, if there is a problem
    steps          that were run
    took_s         seconds of all launches
    """

    rows: list[KillOutcome] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    differences: list[RunDifference] = field(default_factory=list)
    by_itself: list[str] = field(default_factory=list)
    not_proved: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    problem: str = ""
    tail: list[str] = field(default_factory=list)
    steps: int = 0
    took_s: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether every kill was recovered from exactly."""
        return (
            bool(self.rows)
            and not (self.problem or self.differences)
            and all(row.result == "exact" for row in self.rows)
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        fields = asdict(self)
        fields["differences"] = [
            {"what": difference.what, "detail": difference.detail} for difference in self.differences
        ]
        return {"exact": self.is_exact, **fields}


def check_script(
    checked: CheckTarget, place: Path, say: Callable[[str], None], so_far: Callable[[str], None]
) -> CheckReport:
    """Run all launches, one after the other. Each takes at most the limit.

    place    an empty folder for what they leave
    say      hears what is being done
    so_far   hears how far a launch is
    """
    return _Checkup(checked, place, say, so_far).run()


class _Checkup:
    def __init__(
        self, checked: CheckTarget, place: Path, say: Callable[[str], None], so_far: Callable[[str], None]
    ) -> None:
        self._checked, self._say, self._so_far = checked, say, so_far
        self._trials = Trials(checked, place)
        self._report = CheckReport(steps=checked.steps)
        self._compared: list[RunComparison] = []
        self._by_itself: list[RunDifference] = []

    def run(self) -> CheckReport:
        """All of it."""
        report = self._report
        undisturbed = self._launch("undisturbed", [], f"{self._checked.steps} steps, undisturbed")
        if undisturbed.says(disk_cache.NEXT_RUN):
            undisturbed = self._launch("followed", [], "a library's loop was met, and is followed now: again")
        late = [event for event in undisturbed.twin.events if event["event"] == "rank_late"]
        report.late = sorted({f"{event['frame']} (rank {event['rank']}, step {event['step']})" for event in late})
        self._look_for_problem(undisturbed, "undisturbed")
        if not report.problem or undisturbed.twin.exit_code:
            self._compare_with_torchrun(undisturbed)
        if report.problem:
            return report
        report.steps = _taken(undisturbed, self._checked.steps)
        if report.steps < self._checked.steps:
            self._say(f"the script has only {report.steps} steps: it is checked to its end")
        seen = {rank: self._trained(notes.moments) for rank, notes in undisturbed.notes.items()}
        launches, report.missed = plan(seen, report.steps, _ranks_to_kill(undisturbed))
        if not launches:
            report.problem = "it takes too few optimizer steps: there is no moment to kill a rank at"
            return report
        self._kill(launches, undisturbed)
        if any(compared.all for compared in self._compared):
            self._look_at_what_differs(undisturbed)
        return report

    def _trained(self, moments: set[Moment]) -> set[Moment]:
        return {(phase, step) for phase, step in moments if step < self._report.steps}

    def _launch(self, name: str, faults: list[Fault], what: str) -> Trial:
        steps = self._checked.steps
        self._say(f"{what} ...")
        trial = self._trials.run(name, faults, lambda step: self._so_far(f"step {min(step, steps)} of {steps}"))
        self._report.took_s += trial.twin.took_s
        status = trial.twin.status
        for text in status.not_proved if status is not None else ():
            if (finding := trial.as_users(text)) not in self._report.not_proved:
                self._report.not_proved.append(finding)
        return trial

    def _look_for_problem(self, trial: Trial, what: str) -> None:
        twin, report = trial.twin, self._report
        if twin.problem:
            report.problem = f"the {what} run: {twin.problem}"
        elif twin.exit_code != 0:
            report.problem = f"the {what} run fails by itself, with exit code {twin.exit_code}"
        elif not any(rank.digests for rank in trial.notes.values()):
            why = trial.protection if trial.protection.startswith("off") else "it has taken no optimizer step"
            report.problem = f"the {what} run has ended, and ttprun has seen no optimizer step: {trial.as_users(why)}"
        if report.problem:
            report.tail = [trial.as_users(line) for line in _last_lines(twin.folder)]

    def _compare_with_torchrun(self, undisturbed: Trial) -> None:
        """Distinguish what ttprun does to the script without any fault from what differs in each run of it anyway."""
        report = self._report
        # A script that ends before has to end there, too.
        has_left = not undisturbed.twin.exit_code and _taken(undisturbed, self._checked.steps) == self._checked.steps
        steps = {rank: len(notes.values) for rank, notes in undisturbed.notes.items() if has_left}
        plain = self._launch_torchrun("torchrun", steps, "under torchrun")
        differences = compare_with_torchrun(undisturbed, plain)
        if plain.twin.problem:
            report.problem = f"the run under torchrun: {plain.twin.problem}"
        if plain.twin.problem or not differences:
            return
        again = self._launch_torchrun("torchrun-again", steps, "something differs: under torchrun once more")
        self._note_by_itself(compare_with_torchrun(again, plain), "two runs under plain torchrun")
        if report.problem.startswith(_NOT_COMPARABLE):
            return
        unexplained = unlike(differences, self._by_itself)
        if unexplained and not undisturbed.twin.exit_code:  # it may differ now and then, and not between those two
            once_more = self._launch("undisturbed-again", [], "something differs: undisturbed under ttprun once more")
            self._note_by_itself(compare_with_torchrun(once_more, undisturbed), "two runs under ttprun")
            unexplained = unlike(unexplained, self._by_itself)
        if unexplained and not report.problem.startswith(_NOT_COMPARABLE):
            report.differences = unexplained
            first = f"{unexplained[0].what} is not as under torchrun, {undisturbed.as_users(unexplained[0].detail)}"
            report.problem = f"ttprun itself changes this script: {first}; please report it, and run it by torchrun"

    def _launch_torchrun(self, name: str, steps: dict[int, int], what: str) -> Trial:
        self._say(f"{self._checked.steps} steps, {what} ...")
        trial = self._trials.run_by_torchrun(name, steps)
        self._report.took_s += trial.twin.took_s
        return trial

    def _note_by_itself(self, differences: list[RunDifference], of: str) -> None:
        """Note what differs between two runs of the same kind; if what is trained does, nothing can be compared."""
        report = self._report
        self._by_itself += differences
        report.by_itself += [f"{difference.what} ({difference.detail})" for difference in differences]
        first = next((difference for difference in differences if difference.boundary != AT_END), None)
        if first is not None:
            report.problem = (
                f"{_NOT_COMPARABLE}, so nothing can be compared: {first.what} differs between {of}, "
                f"{first.detail}; seed whatever it draws (also default_rng(), time, os.urandom)"
            )

    def _kill(self, launches: list[list[Fault]], undisturbed: Trial) -> None:
        """Launch after launch, till each kill has struck: one that ends the job leaves the rest to another launch."""
        report, waiting = self._report, list(launches)
        faults = [fault for kills in launches for fault in kills]
        why_off = undisturbed.as_users(undisturbed.protection)
        if why_off.startswith("off"):  # the same for all: one is enough to see what it comes to
            waiting = [[next((fault for fault in faults if fault.phase == "backward"), faults[-1])]]
            report.rows = [refused(fault, "refused", why_off) for fault in faults if fault not in waiting[0]]
        number = ended = 0
        while waiting and ended < MOST_ENDED and not report.problem:
            number, kills = number + 1, waiting.pop(0)
            what = f"{report.steps} steps, a rank killed at {len(kills)} moment{'s'[: len(kills) > 1]}"
            trial = self._launch(f"killed-{number}", kills, what)
            rows, remaining = rows_of(trial, kills)
            compared = compare(trial, undisturbed)
            self._compared.append(compared)
            report.rows += blamed(rows, compared.by_step)
            report.differences += compared.at_end
            if trial.twin.problem:
                report.problem = f"the run with kills: {trial.twin.problem}"
            elif trial.twin.exit_code and all(row.result == "exact" for row in rows):
                report.problem = f"the run with kills has ended with exit code {trial.twin.exit_code}"
            if remaining and (len(remaining) == len(kills) or trial.twin.exit_code == 0):
                report.rows += [refused(fault, "not tried", "the run has not come to it again") for fault in remaining]
            elif remaining:
                waiting.insert(0, remaining)
            ended += trial.twin.exit_code != 0
        why = report.problem or f"{ended} runs have ended at a kill: cure that first, and check again"
        report.rows += [refused(fault, "not tried", why) for kills in waiting for fault in kills]
        order = [phase for phase, _, _ in WISHES]
        report.rows.sort(key=lambda row: (order.index(row.phase), row.step))

    def _look_at_what_differs(self, undisturbed: Trial) -> None:
        """Something differs: whatever also differs between two undisturbed runs is not ttprun's doing."""
        report = self._report
        again = self._launch("again", [], "something differs: undisturbed once more, to see what differs by itself")
        self._note_by_itself(compare(again, undisturbed).all, "two runs without any fault")
        report.differences = unlike(report.differences, self._by_itself)


def _ranks_to_kill(undisturbed: Trial) -> list[int]:
    """One of each coordinate; rank 0 and the last one, if who holds what is not known."""
    try:
        return read_topology(undisturbed.twin.folder / "run" / "topology.json").one_of_each_coordinate()
    except (OSError, ValueError):
        return sorted({0, max(undisturbed.notes, default=0)})


def _taken(trial: Trial, wanted: int) -> int:
    """How many of the wanted steps all ranks have taken: fewer if the script has come to its end."""
    return min((wanted, *(len(notes.values) for notes in trial.notes.values())))


def _last_lines(folder: Path) -> list[str]:
    """What a rank said last on stderr, and what the launcher did."""
    ranks = sorted(folder.glob("logs/*/attempt_*/*/stderr.log"))
    lines: list[str] = []
    for path in (*[path for path in ranks if path.stat().st_size][:1], folder / "launcher.log"):
        lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return lines
