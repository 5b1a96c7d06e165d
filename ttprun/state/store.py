"""All checkpoints of a save directory: writes new ones, checks them, removes old ones.

A checkpoint becomes one by a single rename, and no directory ever takes the place of another: whatever dies at
whatever point, what was valid before stays valid. Read `CheckpointStore` first.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ttprun import __version__
from ttprun.state.checkpoint import Checkpoint, Description, Manifest, inspect, is_checkpoint_name, verify
from ttprun.state.draft import DirectoryLock, Draft
from ttprun.state.files import FileEntry, Progress, sync, write_file
from ttprun.state.save_errors import cannot_write, free_name, is_noted

LATEST_NAME = "latest"
DEFAULT_KEEP = 3
# Between these a commit can be cut off; tests kill the process at each. In the order in which they are passed.
COMMIT_POINTS = (
    "files synced",
    "manifest written",
    "directory synced",
    "pointer written",
    "renamed",
    "name synced",
    "pointer replaced",
    "old one set aside",
    "old one removed",
)
_LEFTOVER = re.compile(r"\.(?:writing|removing)-(?:(?:incomplete-)?step-\d{8,}.*|latest)")
logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints in `save_dir`. Looking needs no lock; `begin` does.

    keep  valid checkpoints to keep, 1 or more
    at    called with each of COMMIT_POINTS when a commit has passed it
    """

    def __init__(
        self, save_dir: str | Path, keep: int = DEFAULT_KEEP, at: Callable[[str], None] = lambda point: None
    ) -> None:
        self.save_dir = Path(os.path.expanduser(save_dir)).absolute()  # where there is no home, as it is
        self._keep = keep
        self._at = at
        self._lock: DirectoryLock | None = None
        # What `verify` has found damaged, though its sizes are right.
        self._damaged: dict[str, str] = {}

    def lock(self, run_id: str) -> None:
        """Make the directory if need be, take it for this process, and remove what dead jobs had begun.

        Raises SaveDirectoryInUseError, which names the other job, or CannotWriteError.
        """
        try:
            self.save_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.save_dir, run_id)
            if self._lock.is_exclusive:
                for name in filter(_LEFTOVER.fullmatch, os.listdir(self.save_dir)):
                    _remove(self.save_dir / name)
        except OSError as error:
            raise cannot_write(error, self.save_dir) from error

    @property
    def is_locked(self) -> bool:
        """This process has the directory."""
        return self._lock is not None

    @property
    def killed(self) -> str:
        """Run id of the job that had the directory before, if its launcher was killed; else ""."""
        return self._lock.killed if self._lock is not None else ""

    def unlock(self) -> None:
        """Give the directory back before this process ends."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self, boundary: int) -> Draft:
        """Begin a checkpoint of `boundary`; an earlier draft of it by this run is removed.

        Raises CannotWriteError. Needs the lock.
        """
        if self._lock is None:
            raise RuntimeError("a checkpoint was begun without the lock of its directory")
        folder = self.save_dir / f".writing-step-{boundary:08d}-{self._lock.run_id}"
        try:
            _remove(folder)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise cannot_write(error, self.save_dir) from error
        return Draft(folder, boundary, self._publish, self._at)

    def checkpoints(self) -> list[Checkpoint]:
        """All that are meant as checkpoints, incomplete and damaged ones too, newest boundary first, then last written
        first. Checked by their manifests and sizes; see `verify`. None if there is no such directory.
        """
        try:
            names = os.listdir(self.save_dir)
        except OSError:
            return []
        checkpoints = [inspect(self.save_dir / name) for name in filter(is_checkpoint_name, names)]
        return sorted(checkpoints, key=lambda saved: (saved.boundary, saved.sequence, saved.name), reverse=True)

    def verify(self, checkpoint: Checkpoint, progress: Progress = lambda done, of: None) -> Checkpoint:
        """A checkpoint whose files have been read; one that is damaged is never removed to make room."""
        checked = verify(checkpoint, progress)
        if checkpoint.is_valid and not checked.is_valid:
            self._damaged[checked.name] = checked.reason
        return checked

    def _publish(
        self, draft: Draft, description: Description, entries: dict[str, FileEntry], missing: Sequence[str]
    ) -> Checkpoint:
        """Turn a draft with all its files into a checkpoint. Raises OSError up to the rename, nothing after it."""
        earlier = self.checkpoints()
        manifest = Manifest(
            **dict(description),
            completed=not missing,
            missing=tuple(missing),
            run_id=self._lock.run_id if self._lock else "",
            boundary=draft.boundary,
            sequence=1 + max((checkpoint.sequence for checkpoint in earlier), default=0),
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            versions={"ttprun": __version__, "torch": version("torch"), "python": platform.python_version()},
            files=entries,
        )
        draft.write_manifest(manifest.to_json())
        name = f"step-{draft.boundary:08d}"
        target = free_name(self.save_dir, name if manifest.completed else f"incomplete-{name}")
        pointer = self.save_dir / f".writing-{LATEST_NAME}"
        if manifest.completed:
            # Written now, while running out of space does no harm: replacing a file needs none.
            _remove(pointer)
            write_file(pointer, [f"{target.name}\n".encode()])
            self._at("pointer written")
        draft.folder.rename(target)
        published = Checkpoint(target, manifest, draft.boundary, inspect(target).reason)
        self._finish(published, pointer)
        return published

    def _finish(self, published: Checkpoint, pointer: Path) -> None:
        """What follows on the rename: the checkpoint is there, and what goes wrong here does not change that."""
        self._at("renamed")
        try:
            sync(self.save_dir)
            self._at("name synced")
            if not published.is_valid:
                return
            pointer.replace(self.save_dir / LATEST_NAME)
            sync(self.save_dir)
            self._at("pointer replaced")
            self._remove_old(published)
        except OSError as error:
            logger.warning("checkpoint '%s' is written, but removing old ones failed: %s", published.path, error)

    def _remove_old(self, published: Checkpoint) -> None:
        """Remove valid checkpoints beyond the number to keep, and those of the boundary that was just written again.

        Those from which some launch could not go on are counted by themselves: a run that begins anew because of them
        must not remove them, since they can be all that is left of days of training.

        Renamed first, so that one that is half removed is not taken for a damaged one.
        """
        candidates = [old for old in last_written_first(self.checkpoints()) if old.name not in self._damaged]
        noted = [old for old in candidates if is_noted(old.path)]
        others = [old for old in candidates if old.name != published.name and old not in noted]
        again = [old for old in others if old.boundary == published.boundary]
        older = [old for old in others if old.boundary != published.boundary]
        for old in again + older[self._keep - 1 :] + noted[self._keep :]:
            doomed = self.save_dir / f".removing-{old.name}"
            _remove(doomed)
            old.path.rename(doomed)
            self._at("old one set aside")
            _remove(doomed)
            self._at("old one removed")


def read_latest(save_dir: Path) -> str | None:
    """Name of the checkpoint that was completed last, as `latest` says; None if it says nothing."""
    with suppress(OSError, ValueError):
        return (save_dir / LATEST_NAME).read_text(encoding="utf-8").strip() or None
    return None


def last_written_first(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The valid ones."""
    return sorted((saved for saved in checkpoints if saved.is_valid), key=lambda saved: saved.sequence, reverse=True)


def _remove(path: Path) -> None:
    """Remove a file or a directory of ours, if it is there, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
