"""TensorBoard's event files: each event comes out once, in the file in which the lost rank had begun.

A replay makes the writer of the same name again (origins.py), which would begin its file anew, and what is added in
the replay is nothing to look at. So in a replay nothing is added, and the file is appended to afterwards. Events are
counted like what a script appends to a file itself: those that the lost rank had added since the boundary are passed
over.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ttprun.rank.checks import proof
from ttprun.rank.effects import append_dedup
from ttprun.rank.process.after_import import after_import
from ttprun.rank.session import Session, current

_WRITERS = "tensorboard.summary.writer.event_file_writer"


def follow() -> None:
    """Follow the writers of TensorBoard, once the script has imported them."""
    after_import(_WRITERS, _patch)


def _patch() -> None:
    kind = getattr(sys.modules.get(_WRITERS), "EventFileWriter", None)
    original = getattr(kind, "add_event", None)
    if kind is not None and original is not None and not hasattr(original, "__wrapped__"):
        ours = wrap_add_event(original)
        ours.__wrapped__ = original
        kind.add_event = ours


def wrap_add_event(original: Any) -> Any:
    """EventFileWriter.add_event."""

    def add_event(self: Any, event: Any) -> None:
        session = current()
        if session is None:
            original(self, event)
        elif session.replay is not None and session.is_replaying_alone():
            if not _goes_on(self) and event.HasField("file_version"):
                _tell_of_other_file(session, self)
                original(self, event)  # without it the new file would be none of TensorBoard's
        else:
            key = append_dedup.key_of(f"{getattr(self, '_file_name', '')}#events")
            append_dedup.write(session, key, b"+", lambda one: original(self, event) or len(one))

    return add_event


def _goes_on(writer: Any) -> bool:
    """Whether the lost rank had a file of this name; it is appended to from now on."""
    file = getattr(writer, "_general_file_writer", None)
    if file is None or not os.path.exists(str(getattr(writer, "_file_name", ""))):
        return False
    if hasattr(file, "write_started"):
        file.write_started = True
        return True
    if hasattr(file, "_FileIO__mode"):  # TensorFlow's own
        file._FileIO__mode = "ab"
        return True
    return False


def _tell_of_other_file(session: Session, writer: Any) -> None:
    name = getattr(writer, "_file_name", "a file")
    proof.tell(session, [], [f"TensorBoard goes on in another file than the lost rank's: {name}"])
