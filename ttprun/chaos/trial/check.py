"""A check: some steps of the user's script, in a copy of its folder, with ranks killed. Begin with `check_script`.

The undisturbed run is compared with one by torchrun, and each run with kills with the undisturbed one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ttprun import text_hashes
from ttprun.capture.position import disk_cache
from ttprun.chaos import strikes
from ttprun.chaos.injected_faults import Fault
from ttprun.chaos.plain_observer import sitecustomize
from ttprun.chaos.trial.compare import (
    AT_END,
    TRACE,
    Moment,
    RunDifference,
    Trial,
    compare,
    compare_with_torchrun,
    read_notes,
    unlike,
)
from ttprun.chaos.trial.kills import WISHES, KillOutcome, blamed, plan, refused, rows_of
from ttprun.chaos.trial.twins import PLACES, Launch, WorkingCopy, clean_environment, words_of
from ttprun.config import LaunchValue
from ttprun.observe.status import read_status, read_topology
from ttprun.protocol.reason import Reason

_UNSEEN_LIMIT_S = 10.0  # an unprotected job that has taken no step under our hooks by then would run to its end


@dataclass(frozen=True)
class CheckTarget:
    """What is checked.

    options     of the launch, as given
    torchrun    those of torchrun among them, by name (underscores)
    command     the script and its arguments, or a module and its own
    is_module   -m: the command begins with a module's name
    user_paths  as configured
    folder      the working folder
    shared      names in it that are linked, not copied
    is_in_place the runs use the working folder itself
    steps       optimizer steps after which the ranks leave
    limit_s     seconds that one launch may take
    """

    options: Sequence[str]
    torchrun: Mapping[str, LaunchValue]
    command: Sequence[str]
    is_module: bool
    user_paths: Sequence[str]
    folder: Path
    shared: Collection[str]
    is_in_place: bool
    steps: int
    limit_s: float


def by_ttprun(checked: CheckTarget, copy: WorkingCopy, folder: Path, faults: Sequence[Fault]) -> Launch:
    """A run that ends after the steps that are wanted.

    copy     whose script is run
    folder   of the run
    faults   to be caused in it; empty: none
    """
    options = [*checked.options, "--save-dir", str(folder / "checkpoints"), "--resume", "off", "--allow-faults"]
    options += ["--trace", str(folder / "notes" / TRACE)]
    for fault in faults:
        options += ["--fault", str(fault)]
    environment = _environment(checked, copy) | strikes.order_observer(folder / "notes", checked.steps)
    if not faults:
        plain = sitecustomize.order(str(folder / "notes"), is_alone=False, steps=0, steps_of_rank={})
        environment = _with_plain_observer(environment, plain)
    return _launch("ttprun", options, checked, copy, environment)


def by_torchrun(checked: CheckTarget, copy: WorkingCopy, folder: Path, steps_of_rank: Mapping[int, int]) -> Launch:
    """The same under plain torchrun: nothing is in its ranks but the plain observer.

    All is on this machine, so that it finds a free port by itself.

    steps_of_rank  after which a rank leaves, if not after those that are wanted
    """
    options = {name: value for name, value in checked.torchrun.items() if name not in PLACES}
    plain = sitecustomize.order(str(folder / "notes"), True, checked.steps, steps_of_rank)
    environment = _with_plain_observer(_environment(checked, copy), plain)
    environment.pop("TTPRUN_USER_PATHS", None)
    environment |= text_hashes.seeded(environment)
    return _launch("torchrun", [*words_of(options), "--standalone"], checked, copy, environment)


def _launch(
    launcher: Literal["torchrun", "ttprun"],
    options: Sequence[str],
    checked: CheckTarget,
    copy: WorkingCopy,
    environment: Mapping[str, str],
) -> Launch:
    script, *arguments = checked.command
    command = [script if checked.is_module else copy.inside(script), *map(copy.inside, arguments)]
    return Launch(launcher, [*options, "--tee", "0"], command, environment, checked.limit_s, copy.folder)


def _environment(checked: CheckTarget, copy: WorkingCopy) -> dict[str, str]:
    """The user's own; code that an editable installation takes from the folder itself is the user's too."""
    clean = clean_environment() | {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PET_", "TTPRUN_")) and name not in ("TTPRUN_RUN_ID", "TTPRUN_RUN_DIR")
    }
    paths = clean.pop("PYTHONPATH", "").split(os.pathsep)
    if any(paths):
        clean["PYTHONPATH"] = os.pathsep.join(map(copy.inside, filter(None, paths)))
    own = checked.folder if checked.is_module else Path(checked.command[0]).absolute().parent
    if copy.is_copy and own.is_dir():
        clean["TTPRUN_USER_PATHS"] = os.pathsep.join([*checked.user_paths, str(own)])
    return clean


def _with_plain_observer(environment: Mapping[str, str], variable: Mapping[str, str]) -> dict[str, str]:
    paths = [os.path.dirname(sitecustomize.__file__), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, **variable, "PYTHONPATH": os.pathsep.join(paths)}


class _Watch:
    """Looks at a launch while it runs."""

    def __init__(self, run_dir: Path, steps_so_far: Callable[[int], None]) -> None:
        self._status, self._steps_so_far = run_dir / "status.json", steps_so_far
        self._looks = 0

    def look(self) -> str:
        """Why it need not be waited for any longer; "" to go on. Twice a second."""
        try:
            status = read_status(self._status)
        except (OSError, ValueError):
            return ""
        step = max((rank.step or 0 for rank in status.ranks), default=0)
        self._steps_so_far(step)
        if step or not status.protection.startswith("off"):
            self._looks = 0
            return ""
        self._looks += 1
        return f"it takes no step that ttprun sees: {status.protection}" if self._looks > 2 * _UNSEEN_LIMIT_S else ""


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


def run_traced(
    checked: CheckTarget, place: Path, say: Callable[[str], None], so_far: Callable[[str], None]
) -> tuple[CheckReport, Path]:
    """Run the steps once, without a fault: what has gone wrong, and the trace. As `check_script` otherwise."""
    checkup = _Checkup(checked, place, say, so_far)
    return checkup.run_once(), place / "undisturbed" / "notes" / TRACE


class _Checkup:
    def __init__(
        self, checked: CheckTarget, place: Path, say: Callable[[str], None], so_far: Callable[[str], None]
    ) -> None:
        self._checked, self._place, self._say, self._so_far = checked, place, say, so_far
        self._report = CheckReport(steps=checked.steps)
        self._compared: list[RunDifference] = []
        self._by_itself: list[RunDifference] = []

    def run(self) -> CheckReport:
        """All of it."""
        report = self._report
        undisturbed = self._run("undisturbed", f"{self._checked.steps} steps, undisturbed")
        if undisturbed.says(disk_cache.NEXT_RUN):
            undisturbed = self._run("followed", "a library's loop was met, and is followed now: again")
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
        if self._compared:
            self._look_at_what_differs(undisturbed)
        return report

    def run_once(self) -> CheckReport:
        """One undisturbed launch alone."""
        self._look_for_problem(self._run("undisturbed", f"{self._checked.steps} steps"), "undisturbed")
        return self._report

    def _trained(self, moments: set[Moment]) -> set[Moment]:
        return {(phase, step) for phase, step in moments if step < self._report.steps}

    def _run(self, name: str, what: str, faults: Sequence[Fault] = (), plain: Mapping[int, int] | None = None) -> Trial:
        """One launch, in a copy with the same path as all others, so that nothing differs by its name.

        name     of the trial, a folder
        what     is being done, for the user
        faults   to be caused in it
        plain    under torchrun: after which steps its ranks leave, see `by_torchrun`; None: under ttprun
        """
        self._say(f"{what} ...")
        checked, folder = self._checked, self._place / name
        (folder / "notes").mkdir(parents=True)
        copy = WorkingCopy.none(checked.folder)
        if not checked.is_in_place:
            copy = WorkingCopy.make(checked.folder, self._place / "work", checked.shared)
        launch = (
            by_ttprun(checked, copy, folder, faults) if plain is None else by_torchrun(checked, copy, folder, plain)
        )
        twin = launch.run(folder, _Watch(folder / "run", self._show_step).look)
        changed = copy.changed()
        kept = copy.folder.rename(folder / "work") if copy.is_copy else copy.folder
        self._report.took_s += twin.took_s
        for text in twin.status.not_proved if twin.status is not None else ():
            if (finding := copy.as_users(text)) not in self._report.not_proved:
                self._report.not_proved.append(finding)
        return Trial(twin, read_notes(folder / "notes"), kept, changed, copy.as_users)

    def _show_step(self, step: int) -> None:
        self._so_far(f"step {min(step, self._checked.steps)} of {self._checked.steps}")

    def _look_for_problem(self, trial: Trial, what: str) -> None:
        twin, report = trial.twin, self._report
        if twin.problem:
            report.problem = f"the {what} run: {twin.problem}"
        elif twin.exit_code != 0:
            report.problem = f"the {what} run fails by itself, with exit code {twin.exit_code}"
        elif not any(rank.links for rank in trial.notes.values()):
            why = trial.protection if trial.protection.startswith("off") else "it has taken no optimizer step"
            report.problem = f"the {what} run has ended, and ttprun has seen no optimizer step: {trial.as_users(why)}"
        if report.problem:
            report.tail = [trial.as_users(line) for line in _last_lines(twin.folder)]

    def _compare_with_torchrun(self, undisturbed: Trial) -> None:
        """Distinguish what ttprun does to the script without any fault from what differs in each run of it anyway."""
        report = self._report
        # A script that ends before has to end there, too.
        wanted = self._checked.steps
        has_left = not undisturbed.twin.exit_code and _taken(undisturbed, wanted) == wanted
        steps = {rank: len(notes.values) for rank, notes in undisturbed.notes.items() if has_left}
        plain = self._run("torchrun", f"{wanted} steps, under torchrun", plain=steps)
        differences = compare_with_torchrun(undisturbed, plain)
        if plain.twin.problem:
            report.problem = f"the run under torchrun: {plain.twin.problem}"
        if plain.twin.problem or not differences:
            return
        what = f"{wanted} steps, something differs: under torchrun once more"
        again = self._run("torchrun-again", what, plain=steps)
        self._note_by_itself(compare_with_torchrun(again, plain), "two runs under plain torchrun")
        if report.problem.startswith(_NOT_COMPARABLE):
            return
        unexplained = unlike(differences, self._by_itself)
        if unexplained and not undisturbed.twin.exit_code:  # it may differ now and then, and not between those two
            once_more = self._run("undisturbed-again", "something differs: undisturbed under ttprun once more")
            self._note_by_itself(compare_with_torchrun(once_more, undisturbed), "two runs under ttprun")
            unexplained = unlike(unexplained, self._by_itself)
        if unexplained and not report.problem.startswith(_NOT_COMPARABLE):
            report.differences = unexplained
            first = f"{unexplained[0].what} is not as under torchrun, {undisturbed.as_users(unexplained[0].detail)}"
            report.problem = f"ttprun itself changes this script: {first}; please report it, and run it by torchrun"

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
        why_off = Reason(undisturbed.protection_kind, undisturbed.as_users(undisturbed.protection))
        if why_off.text.startswith("off"):  # the same for all: one is enough to see what it comes to
            waiting = [[next((fault for fault in faults if fault.phase == "backward"), faults[-1])]]
            report.rows = [refused(fault, "refused", why_off) for fault in faults if fault not in waiting[0]]
        number = ended = 0
        while waiting and ended < MOST_ENDED and not report.problem:
            number, kills = number + 1, waiting.pop(0)
            what = f"{report.steps} steps, a rank killed at {len(kills)} moment{'s'[: len(kills) > 1]}"
            trial = self._run(f"killed-{number}", what, kills)
            rows, remaining = rows_of(trial, kills)
            compared = compare(trial, undisturbed)
            self._compared += compared
            report.rows += blamed(rows, compared)
            report.differences += [difference for difference in compared if difference.boundary == AT_END]
            if trial.twin.problem:
                report.problem = f"the run with kills: {trial.twin.problem}"
            elif trial.twin.exit_code and all(row.result == "exact" for row in rows):
                report.problem = f"the run with kills has ended with exit code {trial.twin.exit_code}"
            if remaining and (len(remaining) == len(kills) or trial.twin.exit_code == 0):
                report.rows += [
                    refused(fault, "not tried", Reason(text="the run has not come to it again")) for fault in remaining
                ]
            elif remaining:
                waiting.insert(0, remaining)
            ended += trial.twin.exit_code != 0
        why = report.problem or f"{ended} runs have ended at a kill: cure that first, and check again"
        report.rows += [refused(fault, "not tried", Reason(text=why)) for kills in waiting for fault in kills]
        order = [phase for phase, _, _ in WISHES]
        report.rows.sort(key=lambda row: (order.index(row.phase), row.step))

    def _look_at_what_differs(self, undisturbed: Trial) -> None:
        """Something differs: whatever also differs between two undisturbed runs is not ttprun's doing."""
        report = self._report
        again = self._run("again", "something differs: undisturbed once more, to see what differs by itself")
        self._note_by_itself(compare(again, undisturbed), "two runs without any fault")
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
