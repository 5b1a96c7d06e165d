"""All checkpoints of a save directory: locks it, writes new ones, checks them, removes old ones.

A checkpoint is a draft while it is written. It becomes one by a single rename, and no directory ever takes the place of
another: whatever dies at whatever point, what was valid before stays valid. Read `CheckpointStore` first.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ttprun import __version__
from ttprun.state.checkpoint import (
    MANIFEST_NAME,
    Checkpoint,
    Description,
    Manifest,
    inspect,
    is_checkpoint_name,
    is_noted,
    verify,
)
from ttprun.state.files import (
    Buffer,
    CannotWriteError,
    FileEntry,
    Fill,
    Progress,
    SaveDirectoryInUseError,
    cannot_write,
    free_name,
    read_entry,
    sync,
    write_file,
)

# One job a save directory: a lock that the kernel gives back however the job ends, with the job's name in it.


LOCK_NAME = ".ttprun.lock"


class DirectoryLock:
    """The right to write to a save directory, as long as this process lives or until `release`.

    is_exclusive  False on a file system without locks: two jobs in one directory are then the user's to avoid
    killed        run id and run directory of the job before this one, if its launcher was killed; "" for both if it
                  has given the lock back
    """

    def __init__(self, save_dir: Path, run_id: str, run_dir: str = "") -> None:
        """Take the lock, without waiting. Raises SaveDirectoryInUseError, or OSError if nothing can be written there.

        The file itself is never removed: a job that waits at an old file and one with a new one would both hold it.
        """
        self.run_id = run_id
        self.is_exclusive = True
        self._fd = os.open(save_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            run_id, pid, host, _ = _read_holder(self._fd)
            os.close(self._fd)
            raise SaveDirectoryInUseError(save_dir, run_id or None, pid, host) from None
        except OSError as error:
            self.is_exclusive = False
            logger.warning(
                "'%s' is on a file system without locks (%s); make sure that no other job writes there",
                save_dir,
                error.strerror,
            )
        killed, _, _, its_dir = _read_holder(self._fd)
        self.killed = (killed, its_dir)
        text = json.dumps({"run_id": run_id, "pid": os.getpid(), "host": os.uname().nodename, "run_dir": run_dir})
        with suppress(OSError):  # a full disk: the lock holds all the same, only without a name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode() + b"\n", 0)

    def release(self) -> None:
        """Give the directory back before this process ends."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _read_holder(fd: int) -> tuple[str, int | None, str | None, str]:
    """Run id, pid, host and run directory of the job that holds the lock; "" and None if it has not written them."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return str(holder["run_id"]), int(holder["pid"]), str(holder["host"]), str(holder.get("run_dir", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return "", None, None, ""


# Makes the draft's directory a checkpoint: description, its files, and what is missing if it is not complete.
Publish = Callable[["Draft", Description, dict[str, FileEntry], Sequence[str]], Checkpoint]


class Draft:
    """One checkpoint that is being written. Made by `CheckpointStore.begin`; ends with `commit`, `keep_incomplete` or
    `discard`.

    boundary  optimizer steps that it holds
    folder    where its files are, 0700
    """

    def __init__(self, folder: Path, boundary: int, publish: Publish, at: Callable[[str], None]) -> None:
        self.folder, self.boundary = folder, boundary
        self._publish, self._at = publish, at
        self._entries: dict[str, FileEntry] = {}

    def path(self, name: str) -> Path:
        """Where another process may write the file `name`; it belongs to the checkpoint if it is there at the commit.

        A writer on another host must fsync it itself: `commit` can do that only for its own host.
        """
        return self.folder / name

    def add(self, name: str, content: Buffer | Iterable[Buffer] | Fill) -> FileEntry:
        """Write a file; see `write_file`. Raises CannotWriteError, and then the draft is gone."""
        whole = [content] if isinstance(content, Buffer) else content
        try:
            self._entries[name] = write_file(self.path(name), whole)
        except OSError as error:
            self.discard()
            raise cannot_write(error, self.folder.parent) from error
        return self._entries[name]

    def record(self, name: str, entry: FileEntry) -> None:
        """Take the word of who wrote `name` for its digest, so that the commit need not read it again."""
        self._entries[name] = entry

    def commit(self, description: Description) -> Checkpoint:
        """Make it a checkpoint: all on the disk, manifest last, then one rename. What is hashed is what was not handed
        in. Then `latest` is replaced and old checkpoints are removed.

        Raises CannotWriteError, and then the draft is gone and all older checkpoints are as they were.
        """
        return self._end(description, ())

    def keep_incomplete(self, description: Description, missing: Sequence[str]) -> Checkpoint:
        """Keep what there is under a name that no resume takes.

        missing  which shards of which parameters are not there, at least one

        Raises CannotWriteError, and then the draft is gone.
        """
        if not missing:
            raise ValueError("an incomplete checkpoint must say what is missing")
        return self._end(description, missing)

    def discard(self) -> None:
        """Remove it, as far as that can be done: the next job that locks the directory removes the rest."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, description: Description, missing: Sequence[str]) -> Checkpoint:
        try:
            return self._publish(self, description, self._settle_files(), missing)
        except OSError as error:
            self.discard()
            raise cannot_write(error, self.folder.parent) from error
        except CannotWriteError:
            self.discard()
            raise

    def _settle_files(self) -> dict[str, FileEntry]:
        """Bring all files to the disk, and learn size and digest of each."""
        entries: dict[str, FileEntry] = {}
        # Hidden ones are nobody's of ours: NFS leaves such names where an open file was removed.
        for name in sorted(name for name in os.listdir(self.folder) if not name.startswith(".")):
            path = self.path(name)
            entry = self._entries.get(name)
            if entry is not None and path.stat().st_size != entry.bytes:
                raise CannotWriteError(
                    f"no checkpoint was written to '{self.folder.parent}': {name} has {path.stat().st_size} bytes, "
                    f"and its writer reported {entry.bytes}",
                    "check the disk and the log of its rank",
                )
            sync(path)
            entries[name] = entry or read_entry(path)
        lost = sorted(self._entries.keys() - entries.keys())
        if lost:
            raise CannotWriteError(
                f"no checkpoint was written to '{self.folder.parent}': {', '.join(lost)} is not there",
                "check the disk and the log of its rank",
            )
        self._at("files synced")
        return entries

    def write_manifest(self, text: Iterable[bytes]) -> None:
        """The last file. Raises OSError."""
        write_file(self.path(MANIFEST_NAME), text)
        self._at("manifest written")
        sync(self.folder)
        self._at("directory synced")


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
        self._newest = 0  # of the last checkpoint that was there when we took the lock, or that we have written since
        # What `verify` has found damaged, though its sizes are right.
        self._damaged: dict[str, str] = {}

    def lock(self, run_id: str, run_dir: str = "") -> None:
        """Make the directory if need be, take it for this process, and remove what dead jobs had begun.

        Raises SaveDirectoryInUseError, which names the other job, or CannotWriteError.
        """
        try:
            self.save_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.save_dir, run_id, run_dir)
            if self._lock.is_exclusive:
                for name in filter(_LEFTOVER.fullmatch, os.listdir(self.save_dir)):
                    _remove(self.save_dir / name)
        except OSError as error:
            raise cannot_write(error, self.save_dir) from error
        self._newest = _newest_of(self.checkpoints())

    @property
    def is_locked(self) -> bool:
        """This process has the directory."""
        return self._lock is not None

    @property
    def killed(self) -> tuple[str, str]:
        """Run id and run directory of the job that had the directory before, if its launcher was killed; else ""."""
        return self._lock.killed if self._lock is not None else ("", "")

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
        """Turn a draft with all its files into a checkpoint. Raises OSError up to the rename, nothing after it.

        Also raises CannotWriteError if this launcher may not write here any more. A file system over a network gives
        the lock of a host that it cannot reach to another one, or has no locks, and the first host may come back.
        """
        why_not = f"no checkpoint was written to '{self.save_dir}'"
        if self._lock is None:
            raise CannotWriteError(f"{why_not}: this launcher has given the directory back", "raise persist_timeout_s")
        earlier = self.checkpoints()
        since = next((saved.name for saved in earlier if saved.sequence > self._newest), "")
        if since:
            raise CannotWriteError(
                f"{why_not}: another launcher has written {since} since this one took the directory",
                "if this node was cut off, another one leads; else name another directory with --save-dir",
            )
        manifest = Manifest(
            **dict(description),
            completed=not missing,
            missing=tuple(missing),
            run_id=self._lock.run_id,
            boundary=draft.boundary,
            sequence=1 + _newest_of(earlier),
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
        self._newest = manifest.sequence
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


def _newest_of(checkpoints: Sequence[Checkpoint]) -> int:
    """The highest sequence."""
    return max((checkpoint.sequence for checkpoint in checkpoints), default=0)


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
