"""One launch of a check: the script in a copy of its folder, observed, with or without kills. Read `Trials.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttprun.chaos import observer
from ttprun.chaos.check.notes import Notes, read_notes
from ttprun.chaos.check.working_copy import WorkingCopy
from ttprun.chaos.drill.twins import FOREIGN, Twin, run_launcher
from ttprun.chaos.faults import Fault
from ttprun.observe.status import read_status

_UNSEEN_LIMIT_S = 10.0  # an unprotected job that has taken no step under our hooks by then would run to its end


@dataclass(frozen=True)
class Checked:
    """What is checked.

    options     of the launch, as given
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


class Trials:
    """Runs launches, one after the other: all in a copy with the same path, so that nothing differs by its name.

    place   an empty folder for all that they leave
    """

    def __init__(self, checked: Checked, place: Path) -> None:
        self._checked, self._place = checked, place

    def run(self, name: str, faults: Sequence[Fault], steps_so_far: Callable[[int], None]) -> Trial:
        """Run the script until it has taken the steps that are wanted, at most `limit_s` seconds.

        name          of the trial, a folder
        steps_so_far  called now and then with how far it is
        """
        checked = self._checked
        folder = self._place / name
        notes, run_dir, kept = folder / "notes", folder / "run", folder / "work"
        notes.mkdir(parents=True)
        work = self._place / "work"
        copy = (
            WorkingCopy.none(checked.folder)
            if checked.is_in_place
            else WorkingCopy.make(checked.folder, work, checked.shared)
        )
        watch = _Watch(run_dir, notes, steps_so_far)
        twin = run_launcher(
            launcher_words(checked, copy, folder, faults), folder, copy.folder,
            _environment(checked, copy, notes), checked.limit_s, run_dir, watch.look,
        )  # fmt: skip
        changed = copy.changed()
        if copy.is_copy:
            work.rename(kept)
        return Trial(twin, read_notes(notes), kept if copy.is_copy else checked.folder, changed, copy.as_users)


def launcher_words(checked: Checked, copy: WorkingCopy, folder: Path, faults: Sequence[Fault]) -> list[str]:
    """The command of a launch: the user's options, and ours after them, which win."""
    ours = ["--run-dir", str(folder / "run"), "--save-dir", str(folder / "checkpoints"), "--resume", "off"]
    ours += ["--log-dir", str(folder / "logs"), "--redirects", "3", "--tee", "0", "--allow-faults"]
    for fault in faults:
        ours += ["--fault", str(fault)]
    script, *arguments = checked.command
    return [
        sys.executable, "-m", "ttprun", *checked.options, *ours,
        script if checked.is_module else copy.inside(script), *map(copy.inside, arguments),
    ]  # fmt: skip


def _environment(checked: Checked, copy: WorkingCopy, notes: Path) -> Mapping[str, str]:
    """The user's own; code that an editable installation takes from the folder itself is the user's too."""
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name) or _is_setting(name)}
    paths = clean.get("PYTHONPATH", "").split(os.pathsep)
    clean["PYTHONPATH"] = os.pathsep.join(map(copy.inside, filter(None, paths)))
    if not clean["PYTHONPATH"]:
        del clean["PYTHONPATH"]
    own = checked.folder if checked.is_module else Path(checked.command[0]).absolute().parent
    if copy.is_copy and own.is_dir():
        clean["TTPRUN_USER_PATHS"] = os.pathsep.join([*checked.user_paths, str(own)])
    return clean | observer.order(notes, checked.steps)


def _is_setting(name: str) -> bool:
    """Settings of torchrun and of ttprun that the user has made in the environment."""
    return name.startswith(("PET_", "TTPRUN_")) and name not in ("TTPRUN_RUN_ID", "TTPRUN_RUN_DIR")


class _Watch:
    """Looks at a launch while it runs."""

    def __init__(self, run_dir: Path, notes: Path, steps_so_far: Callable[[int], None]) -> None:
        self._status, self._notes, self._steps_so_far = run_dir / "status.json", notes, steps_so_far
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
