"""One checkpoint directory, looked at: what its manifest says, and whether its files are as the manifest says."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from ttprun.errors import in_short
from ttprun.state.errors import InvalidCheckpointError
from ttprun.state.files import Progress, read_entry
from ttprun.state.manifest import Manifest, read_manifest

# Files that are read at once: one core that fetches and hashes is slower than most disks.
_READERS = 4
# Of a directory in a save directory. Drafts and what is being removed begin with a dot, and match nothing.
_NAME = re.compile(r"(?:incomplete-)?step-(\d{8,})(?:-\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, valid or not.

    path      its directory
    manifest  None if it cannot be relied upon
    boundary  of the manifest, or else of the directory's name; -1 if neither says it
    reason    why nothing may be loaded from it, a sentence; "" if it is valid
    """

    path: Path
    manifest: Manifest | None
    boundary: int
    reason: str = ""

    @property
    def name(self) -> str:
        """Of the directory."""
        return self.path.name

    @property
    def is_valid(self) -> bool:
        """Whether it may be loaded, as far as was looked: after `inspect` by sizes, after `verify` by content."""
        return not self.reason

    @property
    def sequence(self) -> int:
        """Place in the order of writing; 0 if it is not known."""
        return 0 if self.manifest is None else self.manifest.sequence

    def valid_manifest(self) -> Manifest:
        """The manifest. Raises InvalidCheckpointError, with the reason, if nothing may be loaded."""
        if self.manifest is None or self.reason:
            raise InvalidCheckpointError(self.reason)
        return self.manifest

    def file(self, name: str) -> Path:
        """Path of one of its files."""
        return self.path / name


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of that name in a save directory is meant as a checkpoint."""
    return _NAME.fullmatch(name) is not None


def inspect(path: Path) -> Checkpoint:
    """Look at a checkpoint quickly: its manifest, and whether each file is there with its size. Never raises."""
    matched = _NAME.fullmatch(path.name)
    boundary = int(matched[1]) if matched else -1
    try:
        manifest = read_manifest(path)
    except InvalidCheckpointError as error:
        return Checkpoint(path, None, boundary, error.reason)
    return Checkpoint(path, manifest, manifest.boundary, _size_problems(path, manifest))


def verify(checkpoint: Checkpoint, progress: Progress = lambda done, of: None) -> Checkpoint:
    """Read all files and compare their digests; returns the checkpoint with what is wrong as its reason. Never raises.

    One that is known to be invalid comes back as it is. Takes as long as the disk needs for all its bytes.
    `progress` is called on other threads, by one at a time.
    """
    manifest = checkpoint.manifest
    if manifest is None or checkpoint.reason:
        return checkpoint
    done = 0
    is_given_up = False
    lock = Lock()

    def count(size: int) -> None:
        nonlocal done
        if is_given_up:
            raise InterruptedError
        with lock:
            done += size
            progress(done, manifest.size_bytes)

    def problem_of(name: str) -> str:
        try:
            found = read_entry(checkpoint.file(name), count)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return "" if found == manifest.files[name] else f"{name} is damaged: its content differs from what was written"

    with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="ttprun-verify") as readers:
        try:
            problems = list(filter(None, readers.map(problem_of, sorted(manifest.files))))
        except BaseException:  # Ctrl-C: the readers would be waited for
            is_given_up = True
            raise
    return replace(checkpoint, reason="; ".join(problems))


def _size_problems(path: Path, manifest: Manifest) -> str:
    """What is wrong, checked without reading the files; "" if nothing."""
    if not manifest.completed:
        return f"it is incomplete: {in_short(manifest.missing)} missing"
    problems = []
    for name, entry in sorted(manifest.files.items()):
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size != entry.bytes:
            problems.append(f"{name} has {size} bytes, and {entry.bytes} were written")
    return "; ".join(problems)
