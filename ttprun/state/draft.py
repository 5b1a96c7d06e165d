"""A checkpoint while it is written: a directory that counts for nothing until its commit has renamed it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ttprun.state.checkpoint import Checkpoint
from ttprun.state.errors import CannotWriteError, cannot_write
from ttprun.state.files import Buffer, FileEntry, Fill, read_entry, sync, write_file
from ttprun.state.manifest import MANIFEST_NAME, Description

# Makes the draft's directory a checkpoint: description, its files, and what is missing if it is not complete.
Publish = Callable[["Draft", Description, dict[str, FileEntry], Sequence[str]], Checkpoint]


class Draft:
    """One checkpoint that is being written. Made by `CheckpointStore.begin`; ends with `commit`, `keep_incomplete` or
    `discard`.

    boundary  optimizer steps that it holds
    folder    where its files are, 0700
    """

    def __init__(self, folder: Path, boundary: int, publish: Publish, at: Callable[[str], None]) -> None:
        self.folder = folder
        self.boundary = boundary
        self._publish = publish
        self._at = at
        self._entries: dict[str, FileEntry] = {}

    def path(self, name: str) -> Path:
        """Where another process may write the file `name`; it belongs to the checkpoint if it is there at the commit.

        A writer on another host must fsync it itself: `commit` can do that only for its own host.
        """
        return self.folder / name

    def add(self, name: str, content: Buffer | Iterable[Buffer] | Fill) -> FileEntry:
        """Write a file; see `write_file`. Raises CannotWriteError, and then the draft is gone."""
        whole = [content] if isinstance(content, Buffer) else content
        try:
            self._entries[name] = write_file(self.path(name), whole)
        except OSError as error:
            self.discard()
            raise cannot_write(error, self.folder.parent) from error
        return self._entries[name]

    def record(self, name: str, entry: FileEntry) -> None:
        """Take the word of who wrote `name` for its digest, so that the commit need not read it again."""
        self._entries[name] = entry

    def commit(self, description: Description) -> Checkpoint:
        """Make it a checkpoint: all on the disk, manifest last, then one rename. What is hashed is what was not handed
        in. Then `latest` is replaced and old checkpoints are removed.

        Raises CannotWriteError, and then the draft is gone and all older checkpoints are as they were.
        """
        return self._end(description, ())

    def keep_incomplete(self, description: Description, missing: Sequence[str]) -> Checkpoint:
        """Keep what there is under a name that no resume takes.

        missing  which shards of which parameters are not there, at least one

        Raises CannotWriteError, and then the draft is gone.
        """
        if not missing:
            raise ValueError("an incomplete checkpoint must say what is missing")
        return self._end(description, missing)

    def discard(self) -> None:
        """Remove it, as far as that can be done: the next job that locks the directory removes the rest."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, description: Description, missing: Sequence[str]) -> Checkpoint:
        try:
            return self._publish(self, description, self._settle_files(), missing)
        except OSError as error:
            self.discard()
            raise cannot_write(error, self.folder.parent) from error
        except CannotWriteError:
            self.discard()
            raise

    def _settle_files(self) -> dict[str, FileEntry]:
        """Bring all files to the disk, and learn size and digest of each."""
        entries: dict[str, FileEntry] = {}
        # Hidden ones are nobody's of ours: NFS leaves such names where an open file was removed.
        for name in sorted(name for name in os.listdir(self.folder) if not name.startswith(".")):
            path = self.path(name)
            known = self._entries.get(name)
            if known is not None and path.stat().st_size != known.bytes:
                raise CannotWriteError(
                    f"no checkpoint was written to '{self.folder.parent}': {name} has {path.stat().st_size} bytes, "
                    f"and its writer reported {known.bytes}",
                    "check the disk and the log of its rank",
                )
            sync(path)
            entries[name] = known or read_entry(path)
        lost = sorted(self._entries.keys() - entries.keys())
        if lost:
            raise CannotWriteError(
                f"no checkpoint was written to '{self.folder.parent}': {', '.join(lost)} is not there",
                "check the disk and the log of its rank",
            )
        self._at("files synced")
        return entries

    def write_manifest(self, text: Iterable[bytes]) -> None:
        """The last file. Raises OSError."""
        write_file(self.path(MANIFEST_NAME), text)
        self._at("manifest written")
        sync(self.folder)
        self._at("directory synced")
