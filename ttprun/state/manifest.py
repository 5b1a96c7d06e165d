"""The manifest of a checkpoint, `ttprun.json`: what it is, and size and digest of each file. Written last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ttprun.state.errors import InvalidCheckpointError
from ttprun.state.files import NAME_PATTERN, FileEntry, new_digest

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
