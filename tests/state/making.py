"""Small checkpoints, made in this process or in one that ends with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ttprun.state.checkpoint import Checkpoint, Description
from ttprun.state.store import CheckpointStore, last_written_first

DESCRIPTION = Description(world_size=2, cause="periodic", script="train.py")


def locked(save_dir: Path, run_id: str = "r1", keep: int = 3) -> CheckpointStore:
    """A store that holds the lock."""
    store = CheckpointStore(save_dir, keep)
    store.lock(run_id)
    return store


def take(store: CheckpointStore, boundary: int, content: bytes = b"weights") -> Checkpoint:
    """Write one checkpoint of two files."""
    draft = store.begin(boundary)
    draft.add("rank-00000.msgpack", b"records")
    draft.add("tensors-00000.safetensors", content)
    return draft.commit(DESCRIPTION)


def newest_valid(store: CheckpointStore) -> Checkpoint | None:
    """Of the checkpoints that are whole, the one that was written last."""
    return next((one for one in map(store.verify, last_written_first(store.checkpoints())) if one.is_valid), None)


def why_invalid(store: CheckpointStore) -> dict[str, str]:
    """Name -> reason of each checkpoint that is not whole."""
    return {one.name: one.reason for one in map(store.verify, store.checkpoints()) if not one.is_valid}


def names(folder: Path) -> set[str]:
    """What is in a save directory, without the lock."""
    return {path.name for path in folder.iterdir()} - {".ttprun.lock"}


def flip_byte(path: Path, offset: int = 3) -> None:
    """Damage one byte; the size stays."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def run_program(program: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; `prefix` is a command that starts it."""
    command = [*prefix, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
