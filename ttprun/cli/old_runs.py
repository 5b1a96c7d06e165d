"""Run directories of earlier runs in `ttprun-runs/`: by number, age and size, old ones are removed when a run starts.

None is removed that still runs, whose end is not known, or that holds a script's newest checkpoint: that may be all
that is left of a training. Begin with `remove_old_runs`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttprun.observe.run_directory import BASE, RunDirectory
from ttprun.observe.status import read_status
from ttprun.state.store import CheckpointStore

_DOOMED = ".removing-"
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Keep:
    """Which run directories stay: those within all limits.

    runs   how many, the one of the run that starts among them
    days   since they were started; None: no limit
    gib    on the disk, all together; None: no limit. The newest always stays.
    """

    runs: int
    days: float | None = None
    gib: float | None = None


def remove_old_runs(keep: Keep, used: str, base: Path = BASE) -> list[str]:
    """Remove the runs that `keep` does not keep; returns their names.

    used   a path that the run that starts reads from, which stays: what --resume names

    Never raises: what cannot be removed stays, and is tried again by the next run.
    """
    removed = []
    with contextlib.suppress(OSError):
        for leftover in base.glob(f"{_DOOMED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        jobs = sorted(_jobs_in(base), key=lambda job: job.started_at_s, reverse=True)
        old = _beyond(keep, jobs)
        needed = _with_newest_checkpoints(jobs) if old else set()
        for job in old:
            is_used = Path(os.path.expanduser(used)).absolute().is_relative_to(job.path)
            if job.path not in needed and not is_used and all(map(_has_ended, job.runs)) and _remove(job.path):
                removed.append(job.path.name)
    return removed


def _beyond(keep: Keep, jobs: list[_Job]) -> list[_Job]:
    """Those of `jobs`, the newest first, that pass one of the limits."""
    oldest_s = 0.0 if keep.days is None else time.time() - keep.days * _DAY_S
    left_bytes = None if keep.gib is None else keep.gib * 2**30
    old = []
    for number, job in enumerate(jobs):
        is_old = number >= keep.runs or job.started_at_s < oldest_s
        if left_bytes is not None and not is_old:  # a directory is measured only if a limit asks for it
            left_bytes -= _bytes_in(job.path)
            is_old = left_bytes < 0
        if is_old and number > 0:
            old.append(job)
    return old


def _bytes_in(folder: Path) -> int:
    """What the files below a folder take on the disk."""
    taken = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                taken += os.lstat(os.path.join(where, name)).st_blocks * 512
    return taken


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
        for checkpoint in CheckpointStore(run.path / "checkpoints").checkpoints():
            if checkpoint.manifest is not None and checkpoint.is_valid:
                candidate = (checkpoint.manifest.created_at, place)
                newest[checkpoint.manifest.script] = max(newest.get(checkpoint.manifest.script, candidate), candidate)
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
