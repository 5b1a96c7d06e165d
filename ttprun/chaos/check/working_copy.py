"""A copy of the working folder for each run, so that no run sees what another has written, nor the user's files change.

Begin with `WorkingCopy.make`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ttprun.errors import ConfigError

LIMIT_BYTES = 1 << 30
LIMIT_FILES = 20_000
# Of no use to a run, or large and not written: the latter are linked.
_LEFT_OUT = {"__pycache__", "ttprun-runs"}
_LINKED = {".git", ".venv", "node_modules"}
_MIB = 1 << 20


def check_size(source: Path, shared: Collection[str], limit_bytes: int = LIMIT_BYTES) -> None:
    """Raise ConfigError if the folder is too large to be copied, naming what is large in it.

    shared   names in the folder that are linked
    """
    for name in shared:
        if not (source / name).exists():
            raise ConfigError(f"--share: there is no '{name}' in the working folder", "give a name inside it")
    sizes: dict[str, int] = {}
    files = 0
    for path, status in _walk(source, {*shared, *_LINKED}):
        top = path.relative_to(source).parts[0]
        sizes[top] = sizes.get(top, 0) + status.st_size
        files += 1
        if files > LIMIT_FILES:
            break
    total = sum(sizes.values())
    if total <= limit_bytes and files <= LIMIT_FILES:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    many = f"more than {LIMIT_FILES} files" if files > LIMIT_FILES else f"{total // _MIB} MiB"
    raise ConfigError(
        f"the working folder holds {many}, and each run gets a copy of it; largest: '{largest}' "
        f"({sizes[largest] // _MIB} MiB)",
        f"add --share {largest} if the script only reads there, or --in-place for no copies at all",
    )


class WorkingCopy:
    """One copy.

    folder   its own
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self._before = dict(_states(folder))

    @classmethod
    def make(cls, source: Path, folder: Path, shared: Collection[str]) -> WorkingCopy:
        """Copy the folder; what is shared, and folders that nobody trains into, are links to the user's own.

        folder   must not exist yet
        shared   names in `source` that are linked, not copied

        Raises OSError, shutil.Error.
        """
        linked = {*shared, *_LINKED}

        def leave_out(directory: str, names: list[str]) -> set[str]:
            here = Path(directory)
            excluded = {name for name in names if name in _LEFT_OUT or _is_special(here / name)}
            return excluded | {name for name in names if _is_linked(source, here / name, linked)}

        shutil.copytree(source, folder, symlinks=True, ignore=leave_out)
        for path in _linked_in(source, linked):
            os.symlink(path, folder / path.relative_to(source))
        return cls(source, folder)

    @classmethod
    def none(cls, source: Path) -> WorkingCopy:
        """The user's folder itself: nothing is said of what is written there."""
        copy = cls.__new__(cls)
        copy.source = copy.folder = source
        copy._before = {}
        return copy

    @property
    def is_copy(self) -> bool:
        """Whether it is not the user's folder itself."""
        return self.folder != self.source

    def changed(self) -> list[str]:
        """Files that have been written since, by their names in the folder."""
        if not self.is_copy:
            return []
        return sorted(
            name
            for name, state in _states(self.folder)
            if self._before.get(name) != state and not _LEFT_OUT & {*Path(name).parts}
        )

    def inside(self, path: str) -> str:
        """A path of the user's as it is here; itself if it lies outside the folder."""
        full = Path(path).absolute()
        if not self.is_copy or not os.path.isabs(path) or not full.is_relative_to(self.source):
            return path
        return str(self.folder / full.relative_to(self.source))

    def as_users(self, text: str) -> str:
        """A message with the user's own paths."""
        return text.replace(f"{self.folder}{os.sep}", "").replace(str(self.folder), str(self.source))


def _walk(source: Path, linked: Collection[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """The files that a copy would hold."""
    for directory, folders, files in os.walk(source):
        here = Path(directory)
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not _is_linked(source, here / name, linked)]
        for name in files:
            path = here / name
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and not _is_linked(source, path, linked):
                yield path, status


def _is_linked(source: Path, path: Path, linked: Collection[str]) -> bool:
    return str(path.relative_to(source)) in linked or path.name in _LINKED or (path / "pyvenv.cfg").exists()


def _linked_in(source: Path, linked: Collection[str]) -> Iterator[Path]:
    for directory, folders, files in os.walk(source):
        here = Path(directory)
        links = [name for name in (*folders, *files) if _is_linked(source, here / name, linked)]
        folders[:] = [name for name in folders if name not in links and name not in _LEFT_OUT]
        yield from (here / name for name in links)


def _is_special(path: Path) -> bool:
    mode = path.lstat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _states(folder: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for path, status in _walk(folder, _LINKED):
        yield str(path.relative_to(folder)), (status.st_ino, status.st_size, status.st_mtime_ns)
