"""One file of a checkpoint: written, hashed and on the disk before anybody is told that it is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field

# Called with bytes done and bytes in all, at least once a chunk.
Progress = Callable[[int, int], None]
Buffer = bytes | bytearray | memoryview

_CHUNK_BYTES = 8 << 20
# Hashed and written by so much at a time, so that the second of the two finds it in the processor's cache.
_SLICE_BYTES = 1 << 20
# The disk is set to work whenever so much was written, so that it does not begin at the fsync.
_FLUSH_BYTES = 32 << 20
# One path component that hides nothing: what a manifest names lies in the manifest's own directory.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class FileEntry(BaseModel):
    """Size and digest of a file.

    bytes  its size
    xxh3   XXH3 of its content, 128 bits, in hexadecimal
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int = Field(ge=0)
    xxh3: str = Field(pattern=r"^[0-9a-f]{32}$")


def new_digest() -> Any:
    """The hash of all our files: fed by `update`, read by `hexdigest`. It finds damage, it does not keep out malice."""
    return xxhash.xxh3_128()


def write_file(path: Path, chunks: Iterable[Buffer]) -> FileEntry:
    """Write a new file for its owner alone, hash it while it is written, and return when the disk has it.

    chunks  contiguous; each is used up before the next is asked for

    Raises OSError; the part that was written stays. FileExistsError if there is such a file.
    """
    digest = new_digest()
    size = flushed = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        for piece in _slices(chunks):
            digest.update(piece)
            file.write(piece)
            size += len(piece)
            if size - flushed >= _FLUSH_BYTES:
                # Linux answers this advice by starting to write the pages out; it waits for nothing.
                os.posix_fadvise(fd, flushed, size - flushed, os.POSIX_FADV_DONTNEED)
                flushed = size
        file.flush()
        os.fsync(fd)
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def _slices(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    for chunk in chunks:
        whole = memoryview(chunk)
        if whole.nbytes:
            view = whole.cast("B")
            for start in range(0, len(view), _SLICE_BYTES):
                yield view[start : start + _SLICE_BYTES]


def read_entry(path: Path, progress: Callable[[int], None] = lambda done: None) -> FileEntry:
    """Hash a file as it is now; `progress` gets the bytes of each chunk. Raises OSError."""
    digest = new_digest()
    size = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            progress(count)
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def sync(path: Path) -> None:
    """Return when the disk has the file, or the directory's names. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
