"""What can be wrong with a save directory, or with one checkpoint in it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from ttprun import __version__
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


# Notes beside a checkpoint's files about launches that could not resume from it, so that none fails twice.
#
# A note holds for the same command, number of ranks, user's files and versions. Changing one of them, or removing the
# file, allows another try.


NOTE_NAME = "unusable.json"
# Processes may be lost for reasons that have nothing to do with the checkpoint, but hardly so at each launch.
MOST_LOSSES = 2
_MOST_FILES = 2000
_NO_USERS_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
logger = logging.getLogger("ttprun")


def fingerprint(words: Sequence[str], world_size: int, folders: Sequence[Path]) -> str:
    """What a note holds for: the command, the number of ranks, the Python files in the user's folders, the versions.

    words     the script with its arguments, or a module with its own
    folders   each is searched with its subfolders, up to _MOST_FILES files

    Files that are hidden or installed, or that cannot be read, are left out.
    """
    versions = [__version__, version("torch"), platform.python_version()]
    digest = xxhash.xxh3_128(json.dumps([list(words), world_size, versions]).encode())
    for folder in folders:
        for path in _python_files(folder):
            with contextlib.suppress(OSError):
                digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _python_files(folder: Path) -> Iterator[Path]:
    """The first _MOST_FILES, in an order that does not change; what is installed or hidden is not the user's."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NO_USERS_FOLDERS
            and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                yield Path(place, name)
        if count >= _MOST_FILES:
            return


def note(checkpoint: Path, launch: str, reason: str, is_refused: bool) -> None:
    """Note that a run could not resume from a checkpoint. A note that cannot be written is only a warning.

    launch       its `fingerprint`
    is_refused   a check has refused it; False: processes were lost on the way
    """
    notes = _read(checkpoint)
    losses = notes.get(launch, {}).get("losses", 0) + (not is_refused)
    notes[launch] = {"reason": reason, "is_refused": is_refused, "losses": losses}
    try:
        draft = checkpoint / f"{NOTE_NAME}.tmp"
        draft.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        draft.replace(checkpoint / NOTE_NAME)
    except OSError as error:
        logger.warning(
            "that this script cannot resume from '%s' could not be noted there (%s): the next launch tries it again",
            *(checkpoint, error.strerror),
        )


def why_passed_over(checkpoint: Path, launch: str) -> str:
    """Why this launch does not try a checkpoint, which others have not got on from; "" if it may."""
    noted = _read(checkpoint).get(launch, {})
    if not noted or not (noted.get("is_refused") or noted.get("losses", 0) >= MOST_LOSSES):
        return ""
    again = f"remove {checkpoint / NOTE_NAME} to try it again"
    return f"this script could not resume from it before ({noted.get('reason', '')}); {again}"


def refusals(checkpoint: Path) -> list[str]:
    """Why launches could not resume from it, each reason once."""
    return list(dict.fromkeys(str(noted.get("reason", "")) for noted in _read(checkpoint).values()))


def is_noted(checkpoint: Path) -> bool:
    """Whether some launch could not resume from it."""
    return (checkpoint / NOTE_NAME).exists()


def _read(checkpoint: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        notes = json.loads((checkpoint / NOTE_NAME).read_bytes())
        if isinstance(notes, dict) and all(isinstance(entry, dict) for entry in notes.values()):
            return notes
    return {}
