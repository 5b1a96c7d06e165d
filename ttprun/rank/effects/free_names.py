"""Names that a framework takes because they are free on the disk: a replacement takes those of the lost rank again.

Lightning gives a run's folder the next version that is free, and a checkpoint another name if its file is there. To a
replacement nothing looks free that its rank had taken. So a version that was chosen before the first step is kept in
the recorder (origins.py), and a checkpoint that was written after the boundary counts as not there: it is written
again.

The set-up of transformers' own training scripts looks for a checkpoint to resume from. A replacement's must find the
one that its rank's had found, or none, not one that this run has written since.
"""

from __future__ import annotations

import functools
from typing import Any

from ttprun.rank import fail_open
from ttprun.rank.effects import files, origins
from ttprun.rank.session import current


def wrap_next_version(original: Any) -> Any:
    """Of a logger: the version of its folder."""

    def next_version(self: Any) -> Any:
        if not origins.is_on():
            return original(self)
        return origins.draw("version", lambda: original(self), fail_open.caller())

    return next_version


def wrap_file_exists(original: Any) -> Any:
    """ModelCheckpoint.file_exists, which all ranks call."""

    def file_exists(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None and files.is_to_be_written_again(session, filepath):
            filepath = f"{filepath}.not-there"
        return original(self, filepath, *args, **kwargs)

    return file_exists


def wrap_last_checkpoint(original: Any) -> Any:
    """get_last_checkpoint of transformers."""

    def get_last_checkpoint(folder: Any) -> Any:
        if not origins.is_on():
            return original(folder)
        session = current()
        is_replay = session is not None and session.replay is not None
        # A rank that did not look, since there was no folder yet, has left nothing to repeat.
        find = (lambda: None) if is_replay else functools.partial(original, folder)
        return origins.draw("last checkpoint", find, fail_open.caller())

    return get_last_checkpoint
