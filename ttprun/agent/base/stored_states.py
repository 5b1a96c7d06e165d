"""State that ranks can go back to: in memory that outlives them, and in checkpoints on disk.

A rank's own part (its records, and what the replay asks of them) is packed with msgpack; what replicas share lies in
files of tensors, and `header` says what they hold together. New pages of memory cost several times what is copied into
them, so they are taken from the system before the ranks need them. Begin with `Stored`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from msgspec import Struct, ValidationError, convert

from ttprun.capture.records.recorder import RecordTooLargeError
from ttprun.errors import ConfigError
from ttprun.state.checkpoint import Checkpoint
from ttprun.state.files import InvalidCheckpointError
from ttprun.tensors.memory import free_bytes

_SLICE_BYTES = 64 << 20
_NICEST = 19


def new_memory(name: str, count: int) -> list[int]:
    """So many empty files in memory: their descriptors."""
    return [os.memfd_create(f"ttprun-{name}", os.MFD_CLOEXEC) for _ in range(count)]


def path_of(fd: int) -> str:
    """Under which path other processes of this user can open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def take_ahead(files: Sequence[int], size_bytes: int) -> threading.Thread:
    """Give each file in memory so many bytes, on a thread of its own that makes way for all others.

    files   descriptors; they may be closed meanwhile, but whoever writes to them waits for the thread's end: it would
            make a file that is smaller longer

    Where there is not enough memory nothing is taken: whoever needs it will say so.
    """
    own = [os.dup(fd) for fd in files]
    thread = threading.Thread(target=_take, args=(own, size_bytes), name="ttprun-memory", daemon=True)
    thread.start()
    return thread


def _take(files: list[int], size_bytes: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
    try:
        free = free_bytes()
        if free is None or size_bytes * len(files) <= free:
            with contextlib.suppress(OSError):
                for fd in files:
                    for at in range(0, size_bytes, _SLICE_BYTES):
                        os.posix_fallocate(fd, at, min(_SLICE_BYTES, size_bytes - at))
    finally:
        for fd in files:
            os.close(fd)


STATE_FILE = "state.msgpack"
NO_RECORD = "there is no record of that step"
# What says that nothing can be loaded.
UNUSABLE = (ConfigError, InvalidCheckpointError, RecordTooLargeError, LookupError, ValueError)


def rank_file(rank: int) -> str:
    """Name of a rank's own part in a checkpoint."""
    return f"rank-{rank:05d}.msgpack"


def unpack(packed: bytes) -> dict[str, Any]:
    """What `msgpack.packb` has packed of a rank's part."""
    part: dict[str, Any] = msgpack.unpackb(packed, strict_map_key=False)
    return part


def part_in(fd: int) -> dict[str, Any]:
    """A rank's own part, from the memory that holds it. Raises OSError, ValueError."""
    return unpack(os.pread(fd, os.fstat(fd).st_size, 0))


@dataclass(frozen=True)
class Stored:
    """One snapshot or checkpoint.

    boundary   at which it was taken
    place      for the operator
    arguments  with which the script was started, itself the first
    header     of the tensors, as the ranks describe what they hold
    headers    the same by rank, if they describe it differently
    owners     by key of a tensor that not all ranks hold alike: by rank, the lowest one that held the same
    names      of those, for people
    files      paths of the files with the tensors, readable by the ranks
    rank_part  gives a rank's own part, as `Recorder.restore` takes it; raises InvalidCheckpointError if it cannot be
               read
    of_others  set if it is of other ranks or other arguments, so that no rank can go on from it as it is: paths of
               those ranks' own parts, from which the ranks take over what the training has changed
    is_in_recorder  a rank's own part is in its recorder already, with all that has come since
    without    what no record holds, a sentence each: a run that goes on has it as its set-up makes it
    checked_s  seconds that it took to read all files and compare their digests; 0 if they are not on disk
    """

    boundary: int
    place: str
    arguments: tuple[str, ...]
    header: list[Any]
    files: tuple[str, ...]
    rank_part: Callable[[int], dict[str, Any]]
    checked_s: float = 0.0
    of_others: tuple[str, ...] | None = None
    headers: Mapping[int, list[Any]] = field(default_factory=dict)
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_in_recorder: bool = False
    without: tuple[str, ...] = ()

    def header_of(self, rank: int) -> list[Any]:
        """What a rank holds."""
        return self.headers.get(rank, self.header)


def open_checkpoint(checkpoint: Checkpoint, checked_s: float) -> Stored:
    """A checkpoint on disk. Raises InvalidCheckpointError if nothing may be loaded from it."""
    manifest = checkpoint.valid_manifest()
    state = convert(_unpacked(checkpoint.file(STATE_FILE), _StateFile), _StateFile)

    def rank_part(rank: int) -> dict[str, Any]:
        return _unpacked(checkpoint.file(rank_file(rank)), _RankFile)

    tensors = (str(checkpoint.file(name)) for name in manifest.files if name.endswith(".safetensors"))
    return Stored(
        manifest.boundary,
        str(checkpoint.path),
        tuple(state.arguments),
        state.header,
        tuple(tensors),
        rank_part,
        checked_s,
        headers=state.headers,
        owners={key: tuple(owners) for key, owners in state.owners.items()},
        names=state.names,
    )


class _StateFile(Struct):
    """What all ranks share; see `Stored`."""

    arguments: list[str]
    header: list[Any]
    headers: dict[int, list[Any]] = {}
    owners: dict[str, list[int]] = {}
    names: dict[str, str] = {}


class _RankFile(Struct):
    """What must be in a rank's own part."""

    records: list[Any]
    log: list[Any]


def _unpacked(path: Path, kind: type[Struct]) -> dict[str, Any]:
    """A file of a checkpoint. Raises InvalidCheckpointError if it cannot be read, or is not of this kind."""
    try:
        content: dict[str, Any] = unpack(path.read_bytes())
        convert(content, kind)
    except OSError as error:
        raise InvalidCheckpointError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError, ValidationError):
        raise InvalidCheckpointError(f"{path.name} is damaged: it is not what was packed") from None
    return content
