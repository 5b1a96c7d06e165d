"""One file of a checkpoint: written, hashed and synced to disk before it is reported; and what can be wrong there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, Field

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


class CannotReshardError(Exception):
    """The files of a checkpoint do not hold what is wanted; the message says what."""


class CannotWriteError(ConfigError):
    """A checkpoint cannot be written; the older ones are kept. The caller decides whether training continues."""


class SaveDirectoryInUseError(ConfigError):
    """Another job writes to the save directory.

    run_id, pid, host  of that job; None if it has not said so yet
    """

    def __init__(self, save_dir: Path, run_id: str | None, pid: int | None, host: str | None) -> None:
        holder = "another job" if run_id is None else f"run '{run_id}' (pid {pid} on {host})"
        super().__init__(f"{holder} writes to '{save_dir}'", "wait until it has ended, or name another with --save-dir")
        self.run_id, self.pid, self.host = run_id, pid, host


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


# Called with bytes done and bytes in all, at least once a chunk.
Progress = Callable[[int, int], None]
Buffer = bytes | bytearray | memoryview
# Puts the next bytes of a file's content into a buffer, as many as it likes; returns how many, 0 at the end.
Fill = Callable[[memoryview], int]

_CHUNK_BYTES = 1 << 20
_BUFFER_BYTES = 8 << 20
# Copied and hashed by so much at a time, so that the second of the two finds it in the processor's cache.
_SLICE_BYTES = 256 << 10
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


def new_digest() -> xxhash.xxh3_128:
    """The hash of all our files: fed by `update`, read by `hexdigest`. It finds damage, it does not keep out malice."""
    return xxhash.xxh3_128()


def write_file(path: Path, content: Iterable[Buffer] | Fill) -> FileEntry:
    """Write a new file for its owner alone, hash it while it is written, and return when the disk has it.

    content  contiguous chunks, each used up before the next is asked for; or what fills our buffer

    Past the page cache where the file system can: pages for it cost more than all else (half a second of a core for
    each GiB copied, where the disk fetches its data itself), and nobody reads the file soon. One buffer is filled and
    hashed while the other is written: the double buffering of FastPersist (arXiv:2406.13768).

    Raises OSError; the part that was written stays. FileExistsError if there is such a file.
    """
    fill = content if callable(content) else _filler(content)
    fd = _create(path)
    try:
        with _Disk(fd) as disk:
            digest = new_digest()
            size = 0
            while count := _fill_whole(disk.buffers[0], fill, digest):
                disk.write(count)
                size += count
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system that knows no direct writing has made the file before it said so.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)


def _fill_whole(buffer: memoryview, fill: Fill, digest: xxhash.xxh3_128) -> int:
    """Fill a buffer as far as there is content, hash it slice by slice; returns the bytes that it has now."""
    at = 0
    while at < len(buffer) and (count := fill(buffer[at : at + _SLICE_BYTES])):
        digest.update(buffer[at : at + count])
        at += count
    return at


def _filler(chunks: Iterable[Buffer]) -> Fill:
    """Hands chunks out as a buffer has room."""
    remainder = memoryview(b"")
    rest = iter(chunks)

    def fill(buffer: memoryview) -> int:
        nonlocal remainder
        while not remainder:
            chunk = next(rest, None)
            if chunk is None:
                return 0
            whole = memoryview(chunk)
            remainder = whole.cast("B") if whole.nbytes else memoryview(b"")
        count = min(len(remainder), len(buffer))
        buffer[:count] = remainder[:count]
        remainder = remainder[count:]
        return count

    return fill


class _Disk:
    """Writes one of two buffers to a file, on a thread of its own, while the other one, the first, is filled."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Anonymous maps begin on a page, as direct writing asks.
        self.buffers = [memoryview(mmap.mmap(-1, _BUFFER_BYTES)) for _ in range(2)]
        self._at = self._flushed = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ttprun-disk")
        self._pending: Future[None] | None = None

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._pending is not None and kind is None:
                self._pending.result()
        finally:
            self._thread.shutdown()

    def write(self, count: int) -> None:
        """Begin to write the free buffer's first `count` bytes, once the one before is written. Raises its OSError."""
        if self._pending is not None:
            self._pending.result()
        self._pending = self._thread.submit(self._write, self.buffers[0][:count], self._at)
        self._at += count
        self.buffers.reverse()

    def _write(self, piece: memoryview, at: int) -> None:
        while piece:
            try:
                count = os.pwrite(self._fd, piece, at)
            except OSError as error:  # EINVAL: the file's last piece is no whole number of the disk's blocks
                if error.errno != errno.EINVAL or not self._leave_direct():
                    raise
                continue
            piece, at = piece[count:], at + count
        if not self._is_direct() and at - self._flushed >= _FLUSH_BYTES:
            # Linux answers this advice by starting to write the pages out; it waits for nothing.
            os.posix_fadvise(self._fd, self._flushed, at - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = at

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT)

    def _leave_direct(self) -> bool:
        """Write through the page cache from now on; False if that was so."""
        if not self._is_direct():
            return False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return True


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


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of a file to read and write, for as long as it is needed. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
