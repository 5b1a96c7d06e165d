"""Run directories of earlier runs in `ttprun-runs/`: the newest stay, the others are removed when a run starts.

None is removed that still runs, whose end is not known, or that holds a script's newest checkpoint: that may be all
that is left of a training. Begin with `remove_old_runs`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttprun.observe.run_directory import BASE, RunDirectory
from ttprun.observe.status import read_status
from ttprun.state.store import CheckpointStore

_DOOMED = ".removing-"


def remove_old_runs(keep: int, used: str, base: Path = BASE) -> list[str]:
    """Remove the oldest runs beyond `keep`; returns their names.

    keep   directories that stay, the one of the run that starts among them
    used   a path that the run that starts reads from, which stays: what --resume names

    Never raises: what cannot be removed stays, and is tried again by the next run.
    """
    removed = []
    with contextlib.suppress(OSError):
        for leftover in base.glob(f"{_DOOMED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        jobs = sorted(_jobs_in(base), key=lambda job: job.started_at_s, reverse=True)
        old = jobs[keep:]
        needed = _with_newest_checkpoints(jobs) if old else set()
        for job in old:
            is_used = Path(os.path.expanduser(used)).absolute().is_relative_to(job.path)
            if job.path not in needed and not is_used and all(map(_has_ended, job.runs)) and _remove(job.path):
                removed.append(job.path.name)
    return removed


@dataclass(frozen=True)
class _Job:
    """A directory in `ttprun-runs/`.

    runs   it alone, or the folders of the nodes in it
    """

    path: Path
    runs: list[RunDirectory]

    @property
    def started_at_s(self) -> float:
        return max(run.started_at_s for run in self.runs)


def _jobs_in(base: Path) -> Iterator[_Job]:
    """Directories that this user's runs have made here."""
    for path in base.iterdir():
        if path.is_symlink() or path.lstat().st_uid != os.geteuid() or path.name[0] == ".":
            continue
        run = RunDirectory(path)
        runs = [run] if run.is_run else run.nodes
        if runs:
            yield _Job(path.absolute(), runs)


def _with_newest_checkpoints(jobs: list[_Job]) -> set[Path]:
    """For each script, the directory of the job that has written its newest valid checkpoint."""
    newest: dict[str, tuple[str, Path]] = {}
    for place, run in ((job.path, run) for job in jobs for run in job.runs):
        for one in CheckpointStore(run.path / "checkpoints").checkpoints():
            if one.manifest is not None and one.is_valid:
                found = (one.manifest.created_at, place)
                newest[one.manifest.script] = max(newest.get(one.manifest.script, found), found)
    return {path for _, path in newest.values()}


def _has_ended(run: RunDirectory) -> bool:
    """No process holds its lock, and it says so, or was killed before it had a status."""
    try:
        fd = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return read_status(run.status).has_ended
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _remove(path: Path) -> bool:
    """Renamed first, so that one that is half removed is not taken for a run."""
    doomed = path.with_name(_DOOMED + path.name)
    try:
        path.rename(doomed)
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True
