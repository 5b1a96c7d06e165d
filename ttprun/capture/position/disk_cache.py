"""Files that one run keeps for the next: which files of packages have training loops.

A package's file in which a run has met one is followed from the next run on (`note`). For each there is a small file of
JSON in `ttprun/followed` of the user's cache folder ($XDG_CACHE_HOME, else ~/.cache): a path, and a digest of what the
file held then. Another version of a package is met anew. It is only read if folder and file belong to this user, and no
one else may write to or read them; if nothing can be kept, nothing is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def read(name: str) -> bytes | None:
    """The content of a file in the folder; None if it is not there, or somebody else could have written it."""
    with contextlib.suppress(OSError), _opened_folder() as folder:
        fd = os.open(name, _OPEN, dir_fd=folder)
        with os.fdopen(fd, "rb") as file:
            _refuse_others(os.fstat(fd), stat.S_ISREG)
            return file.read()
    return None


def write(name: str, content: bytes) -> bool:
    """Put a file into the folder, in the place of an older one; returns whether that could be done."""
    with contextlib.suppress(OSError), _opened_folder() as folder:
        new = f"{name}.{os.getpid()}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        except OSError:
            os.unlink(new, dir_fd=folder)
    return False


def names() -> list[str]:
    """The files in the folder."""
    with contextlib.suppress(OSError), _opened_folder() as folder:
        return sorted(os.listdir(folder))
    return []


@contextlib.contextmanager
def _opened_folder() -> Iterator[int]:
    """The folder, open. Raises OSError if there is none that is this user's alone."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(home, "ttprun", "followed")
    if not os.path.isabs(path):
        raise FileNotFoundError(path)
    os.makedirs(path, 0o700, exist_ok=True)
    fd = os.open(path, _OPEN | os.O_DIRECTORY)
    try:
        _refuse_others(os.fstat(fd), stat.S_ISDIR)
        yield fd
    finally:
        os.close(fd)


def _refuse_others(status: os.stat_result, is_right: Any) -> None:
    if not is_right(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError("somebody else could have written it")


_ENDING = ".loop"
NEXT_RUN = "its file is followed from the next run on"


def note(filename: str) -> bool:
    """Have the next run follow the loops of a file; returns whether it will."""
    name, entry = hashlib.sha256(os.fsencode(filename)).hexdigest()[:32] + _ENDING, _entry_of(filename)
    return bool(entry) and (read(name) == entry or write(name, entry))


def files() -> list[str]:
    """The files that earlier runs have noted, and that are still the same."""
    filenames = []
    for name in names():
        content = read(name) if name.endswith(_ENDING) else None
        if content is not None and (filename := _file_in(content)) and content == _entry_of(filename):
            filenames.append(filename)
    return filenames


def _file_in(content: bytes) -> str:
    try:
        fields = json.loads(content)
    except ValueError:
        return ""
    filename = fields.get("file") if isinstance(fields, dict) else None
    return filename if isinstance(filename, str) else ""


def _entry_of(filename: str) -> bytes:
    """What is kept of a file; b"" if it cannot be read."""
    try:
        digest = hashlib.sha256(Path(filename).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return b""
    return json.dumps({"file": filename, "sha256": digest}).encode()
