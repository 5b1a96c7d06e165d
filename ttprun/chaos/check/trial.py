"""One launch of a check: the script in a copy of its folder, observed, with or without kills. Read `Trials.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttprun import text_hashes
from ttprun.chaos import observer
from ttprun.chaos.check.notes import Notes, read_notes
from ttprun.chaos.check.working_copy import WorkingCopy
from ttprun.chaos.drill.twins import FOREIGN, PLACES, Twin, run_launcher, words_of
from ttprun.chaos.faults import Fault
from ttprun.chaos.plain_observer import sitecustomize
from ttprun.config import LaunchValue
from ttprun.observe.status import read_status

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


@dataclass(frozen=True)
class Trial:
    """A launch that has ended.

    kept      where its copy of the working folder is now
    changed   names of the files that it has written there
    as_users  turns paths of the copy in a message into the user's own
    """

    twin: Twin
    notes: Notes
    kept: Path
    changed: list[str]
    as_users: Callable[[str], str]

    @property
    def protection(self) -> str:
        """As in the status; "" if there is none."""
        return self.twin.status.protection if self.twin.status is not None else ""

    def says(self, text: str) -> bool:
        """Whether its status says this of its protection, or of what is not proved."""
        status = self.twin.status
        return status is not None and any(text in said for said in (status.protection, *status.not_proved))


class Trials:
    """Runs launches, one after the other: all in a copy with the same path, so that nothing differs by its name.

    place   an empty folder for all that they leave
    """

    def __init__(self, checked: CheckTarget, place: Path) -> None:
        self._checked, self._place = checked, place

    def run(self, name: str, faults: Sequence[Fault], steps_so_far: Callable[[int], None]) -> Trial:
        """Run the script until it has taken the steps that are wanted, at most `limit_s` seconds.

        name          of the trial, a folder
        steps_so_far  called now and then with how far it is
        """
        folder, copy = self._begin(name)
        words = launcher_words(self._checked, copy, folder, faults)
        environment = _environment(self._checked, copy) | observer.order(folder / "notes", self._checked.steps)
        if not faults:
            plain = sitecustomize.order(str(folder / "notes"), is_alone=False, steps=0, steps_of_rank={})
            environment = _with_plain_observer(environment, plain)
        watch = _Watch(folder / "run", steps_so_far)
        limit_s = self._checked.limit_s
        twin = run_launcher(words, folder, copy.folder, environment, limit_s, folder / "run", watch.look)
        return self._end(twin, copy)

    def run_by_torchrun(self, name: str, steps_of_rank: Mapping[int, int]) -> Trial:
        """Run the script under plain torchrun: nothing is in its ranks but the plain observer.

        steps_of_rank  after which a rank leaves, if not after those that are wanted
        """
        folder, copy = self._begin(name)
        words = torchrun_words(self._checked, copy, folder)
        plain = sitecustomize.order(str(folder / "notes"), True, self._checked.steps, steps_of_rank)
        environment = _with_plain_observer(_environment(self._checked, copy), plain)
        environment.pop("TTPRUN_USER_PATHS", None)
        environment |= text_hashes.seeded(environment)
        return self._end(run_launcher(words, folder, copy.folder, environment, self._checked.limit_s, None), copy)

    def _begin(self, name: str) -> tuple[Path, WorkingCopy]:
        """The folder of a trial, and its copy of the working folder."""
        checked, folder = self._checked, self._place / name
        (folder / "notes").mkdir(parents=True)
        if checked.is_in_place:
            return folder, WorkingCopy.none(checked.folder)
        return folder, WorkingCopy.make(checked.folder, self._place / "work", checked.shared)

    def _end(self, twin: Twin, copy: WorkingCopy) -> Trial:
        changed, kept = copy.changed(), copy.folder
        if copy.is_copy:
            kept = copy.folder.rename(twin.folder / "work")
        return Trial(twin, read_notes(twin.folder / "notes"), kept, changed, copy.as_users)


def launcher_words(checked: CheckTarget, copy: WorkingCopy, folder: Path, faults: Sequence[Fault]) -> list[str]:
    """The command of a launch: the user's options, and ours after them, which win.

    copy     whose script is run
    folder   of the trial, for its run directory, checkpoints and logs
    faults   to be caused in it; empty: none
    """
    ours = ["--run-dir", str(folder / "run"), "--save-dir", str(folder / "checkpoints"), "--resume", "off"]
    ours += [*_logs(folder), "--allow-faults"]
    for fault in faults:
        ours += ["--fault", str(fault)]
    return [sys.executable, "-m", "ttprun", *checked.options, *ours, *_command(checked, copy)]


def torchrun_words(checked: CheckTarget, copy: WorkingCopy, folder: Path) -> list[str]:
    """The command of the same launch by torchrun. All is on this machine, so that it finds a free port by itself.

    copy, folder   as for `launcher_words`
    """
    options = {name: value for name, value in checked.torchrun.items() if name not in PLACES}
    launcher = [sys.executable, "-m", "torch.distributed.run", *words_of(options), "--standalone"]
    return [*launcher, *_logs(folder), *_command(checked, copy)]


def _logs(folder: Path) -> list[str]:
    return ["--log-dir", str(folder / "logs"), "--redirects", "3", "--tee", "0"]


def _command(checked: CheckTarget, copy: WorkingCopy) -> list[str]:
    script, *arguments = checked.command
    return [script if checked.is_module else copy.inside(script), *map(copy.inside, arguments)]


def _environment(checked: CheckTarget, copy: WorkingCopy) -> dict[str, str]:
    """The user's own; code that an editable installation takes from the folder itself is the user's too."""
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name) or _is_setting(name)}
    paths = clean.get("PYTHONPATH", "").split(os.pathsep)
    clean["PYTHONPATH"] = os.pathsep.join(map(copy.inside, filter(None, paths)))
    if not clean["PYTHONPATH"]:
        del clean["PYTHONPATH"]
    own = checked.folder if checked.is_module else Path(checked.command[0]).absolute().parent
    if copy.is_copy and own.is_dir():
        clean["TTPRUN_USER_PATHS"] = os.pathsep.join([*checked.user_paths, str(own)])
    return clean


def _with_plain_observer(environment: Mapping[str, str], variable: Mapping[str, str]) -> dict[str, str]:
    paths = [os.path.dirname(sitecustomize.__file__), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, **variable, "PYTHONPATH": os.pathsep.join(paths)}


def _is_setting(name: str) -> bool:
    """Settings of torchrun and of ttprun that the user has made in the environment."""
    return name.startswith(("PET_", "TTPRUN_")) and name not in ("TTPRUN_RUN_ID", "TTPRUN_RUN_DIR")


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
