"""What can be wrong with a save directory, or with one checkpoint in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ttprun.errors import ConfigError

# errno -> (cause, cure)
_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or name another directory with --save-dir"),
    errno.EDQUOT: ("your disk quota is used up", "remove files of yours, or name another directory with --save-dir"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or name another directory with --save-dir"),
    errno.EACCES: ("permission denied", "make it writable for you, or name another directory with --save-dir"),
    errno.EPERM: ("operation not permitted", "make it writable for you, or name another directory with --save-dir"),
    errno.EFBIG: ("a file would be larger than is allowed", "raise 'ulimit -f', or name another file system"),
}


class InvalidCheckpointError(Exception):
    """A checkpoint that must not be loaded. `reason` is a sentence without a full stop that names no directory."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CannotWriteError(ConfigError):
    """A checkpoint cannot be written; the older ones are kept. The caller decides whether training continues."""


class SaveDirectoryInUseError(ConfigError):
    """Another job writes to the save directory.

    run_id, pid, host  of that job; None if it has not said so yet
    """

    def __init__(self, save_dir: Path, run_id: str | None, pid: int | None, host: str | None) -> None:
        holder = "another job" if run_id is None else f"run '{run_id}' (pid {pid} on {host})"
        super().__init__(f"{holder} writes to '{save_dir}'", "wait until it has ended, or name another with --save-dir")
        self.run_id = run_id
        self.pid = pid
        self.host = host


def cannot_write(error: OSError, place: Path) -> CannotWriteError:
    """Say in words why `place` could not be written, and what helps."""
    unknown = (error.strerror or str(error), "name another directory with --save-dir")
    cause, cure = _CAUSES.get(error.errno or 0, unknown)
    return CannotWriteError(f"no checkpoint can be written to '{place}': {cause}", cure)


def free_name(folder: Path, name: str) -> Path:
    """`name` in `folder`, with `-2`, `-3`, ... appended if something has that name: no file is replaced."""
    taken = set(os.listdir(folder))
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return folder / candidate
