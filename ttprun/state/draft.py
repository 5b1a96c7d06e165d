"""A checkpoint while it is written: a directory that counts for nothing until its commit has renamed it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ttprun.state.checkpoint import MANIFEST_NAME, Checkpoint, Description
from ttprun.state.files import Buffer, FileEntry, Fill, read_entry, sync, write_file
from ttprun.state.save_errors import CannotWriteError, SaveDirectoryInUseError, cannot_write

# One job a save directory: a lock that the kernel gives back however the job ends, with the job's name in it.


LOCK_NAME = ".ttprun.lock"
logger = logging.getLogger(__name__)


class DirectoryLock:
    """The right to write to a save directory, as long as this process lives or until `release`.

    is_exclusive  False on a file system without locks: two jobs in one directory are then the user's to avoid
    killed        run id of the job before this one, if its launcher was killed; "" if it has given the lock back
    """

    def __init__(self, save_dir: Path, run_id: str) -> None:
        """Take the lock, without waiting. Raises SaveDirectoryInUseError, or OSError if nothing can be written there.

        The file itself is never removed: a job that waits at an old file and one with a new one would both hold it.
        """
        self.run_id = run_id
        self.is_exclusive = True
        self._fd = os.open(save_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(self._fd)
            os.close(self._fd)
            raise SaveDirectoryInUseError(save_dir, *holder) from None
        except OSError as error:
            self.is_exclusive = False
            logger.warning(
                "'%s' is on a file system without locks (%s); make sure that no other job writes there",
                save_dir,
                error.strerror,
            )
        self.killed = _read_holder(self._fd)[0] or ""
        text = json.dumps({"run_id": run_id, "pid": os.getpid(), "host": os.uname().nodename})
        with suppress(OSError):  # a full disk: the lock holds all the same, only without a name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode() + b"\n", 0)

    def release(self) -> None:
        """Give the directory back before this process ends."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _read_holder(fd: int) -> tuple[str | None, int | None, str | None]:
    """Run id, pid and host of the job that holds the lock; None for each if it has not written them."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return str(holder["run_id"]), int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None, None


# Makes the draft's directory a checkpoint: description, its files, and what is missing if it is not complete.
Publish = Callable[["Draft", Description, dict[str, FileEntry], Sequence[str]], Checkpoint]


class Draft:
    """One checkpoint that is being written. Made by `CheckpointStore.begin`; ends with `commit`, `keep_incomplete` or
    `discard`.

    boundary  optimizer steps that it holds
    folder    where its files are, 0700
    """

    def __init__(self, folder: Path, boundary: int, publish: Publish, at: Callable[[str], None]) -> None:
        self.folder = folder
        self.boundary = boundary
        self._publish = publish
        self._at = at
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
