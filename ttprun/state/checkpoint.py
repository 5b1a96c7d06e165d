"""One checkpoint directory, looked at: what its manifest says, and whether its files are as the manifest says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ttprun import __version__
from ttprun.errors import in_short
from ttprun.state.files import NAME_PATTERN, FileEntry, InvalidCheckpointError, Progress, new_digest, read_entry

# The manifest of a checkpoint, `ttprun.json`: what it is, and size and digest of each file. Written last.


MANIFEST_NAME = "ttprun.json"
FORMAT = 3
_CHECKSUM = "checksum"

FileName = Annotated[str, Field(pattern=NAME_PATTERN)]


class Description(BaseModel):
    """What the writer of a checkpoint says of it.

    world_size  ranks of the job
    cause       why it was taken: "periodic", "asked", "ended" or "dying gasp"
    script      the user's script, as it was named
    model       variable that holds a module ("model", "self.model") -> name in its state_dict -> file, key in the file
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    world_size: int = Field(ge=1)
    cause: str
    script: str
    model: dict[str, dict[str, tuple[FileName, str]]] = {}


class Manifest(Description):
    """All that `ttprun.json` holds, beside a checksum of itself.

    format      number of this layout; another one cannot be read
    completed   whether everything is there; otherwise nothing may resume from it
    missing     which shards of which parameters are not there, for people; empty if completed
    boundary    optimizer steps that were done
    sequence    higher than that of any checkpoint that was in the directory before. The order of writing: boundaries
                go back when a run is resumed from an older checkpoint on purpose, and clocks do as they please
    created_at  ISO 8601 in UTC
    versions    of ttprun, torch and python
    files       name -> size and digest
    """

    format: int = FORMAT
    completed: bool
    missing: tuple[str, ...] = ()
    run_id: str
    boundary: int = Field(ge=0)
    sequence: int = Field(ge=1)
    created_at: str
    versions: dict[str, str]
    files: dict[FileName, FileEntry]

    @property
    def size_bytes(self) -> int:
        """Of all files together, without the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> Iterator[bytes]:
        """The text of `ttprun.json`."""
        content = self.model_dump(mode="json")
        yield json.dumps(content | {_CHECKSUM: _checksum(content)}, indent=1).encode()
        yield b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`. Raises InvalidCheckpointError, with a sentence, if it cannot be
    relied upon; whether the files are as it says is not looked at.
    """
    try:
        raw = json.loads((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise InvalidCheckpointError(
            f"there is no {MANIFEST_NAME} in it" if folder.is_dir() else "there is no such directory"
        ) from None
    except OSError as error:
        raise InvalidCheckpointError(f"{MANIFEST_NAME} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
        raise InvalidCheckpointError(f"{MANIFEST_NAME} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidCheckpointError(f"{MANIFEST_NAME} is not a JSON object")
    if raw.get("format") != FORMAT:
        raise InvalidCheckpointError(
            f"{MANIFEST_NAME} is of format {raw.get('format')!r:.40}, and this ttprun reads format {FORMAT}"
        )
    checksum = raw.pop(_CHECKSUM, None)
    try:
        manifest = Manifest.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidCheckpointError(f"{MANIFEST_NAME}: {where}: {first['msg'].lower()}") from None
    if checksum != _checksum(raw):
        raise InvalidCheckpointError(f"{MANIFEST_NAME} is damaged: its checksum does not match")
    return manifest


def _checksum(content: dict[str, Any]) -> str:
    digest = new_digest()
    digest.update(json.dumps(content, sort_keys=True).encode())
    return str(digest.hexdigest())


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
            entry = read_entry(checkpoint.file(name), count)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return "" if entry == manifest.files[name] else f"{name} is damaged: its content differs from what was written"

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


# Notes beside a checkpoint's files about launches that could not resume from it, so that none fails twice.
#
# A note holds for the same command, number of ranks, user's files and versions. Changing one of them, or removing the
# file, allows another try.


logger = logging.getLogger("ttprun")


NOTE_NAME = "unusable.json"


# Processes may be lost for reasons that have nothing to do with the checkpoint, but hardly so at each launch.
MOST_LOSSES = 2


_MOST_FILES = 2000


_NO_USERS_FOLDERS = {"__pycache__", "node_modules", "site-packages"}


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
    notes = _read_note(checkpoint)
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
    noted = _read_note(checkpoint).get(launch, {})
    if not noted or not (noted.get("is_refused") or noted.get("losses", 0) >= MOST_LOSSES):
        return ""
    again = f"remove {checkpoint / NOTE_NAME} to try it again"
    return f"this script could not resume from it before ({noted.get('reason', '')}); {again}"


def refusals(checkpoint: Path) -> list[str]:
    """Why launches could not resume from it, each reason once."""
    return list(dict.fromkeys(str(noted.get("reason", "")) for noted in _read_note(checkpoint).values()))


def is_noted(checkpoint: Path) -> bool:
    """Whether some launch could not resume from it."""
    return (checkpoint / NOTE_NAME).exists()


def _read_note(checkpoint: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        notes = json.loads((checkpoint / NOTE_NAME).read_bytes())
        if isinstance(notes, dict) and all(isinstance(entry, dict) for entry in notes.values()):
            return notes
    return {}
