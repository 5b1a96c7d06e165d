"""Files of packages in which a run has met a training loop: they are followed from the next run on.

For each, a small file of JSON lies beside the compiled modules (compiled_cache.py), and is trusted as little as those:
it holds a path, and a digest of what the file held then. Another version of a package is met anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ttprun.capture.position import compiled_cache

_ENDING = ".loop"
NEXT_RUN = "its file is followed from the next run on"


def note(filename: str) -> bool:
    """Have the next run follow the loops of a file; returns whether it will."""
    name, entry = _name_of(filename), _entry_of(filename)
    return bool(entry) and (compiled_cache.read(name) == entry or compiled_cache.write(name, entry))


def files() -> list[str]:
    """The files that earlier runs have noted, and that are still the same."""
    filenames = []
    for name in compiled_cache.names():
        content = compiled_cache.read(name) if name.endswith(_ENDING) else None
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


def _name_of(filename: str) -> str:
    return hashlib.sha256(os.fsencode(filename)).hexdigest()[:32] + _ENDING


def _entry_of(filename: str) -> bytes:
    """What is kept of a file; b"" if it cannot be read."""
    try:
        digest = hashlib.sha256(Path(filename).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return b""
    return json.dumps({"file": filename, "sha256": digest}).encode()
