"""TensorBoard's event files: each event is written once, to the lost rank's file.

A replay makes a writer of the same name (origins.py), which would truncate the file. So in a replay no event is added,
and the file is appended to afterwards. Events are counted like appended bytes (append_dedup.py): those that the lost
rank has added since the boundary are skipped.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ttprun.capture.effects import append_dedup
from ttprun.capture.host import current
from ttprun.introspect import signal_handlers
from ttprun.introspect.after_import import after_import

_WRITERS = "tensorboard.summary.writer.event_file_writer"


def follow() -> None:
    """Patch TensorBoard's writer, once the script has imported it."""
    after_import(_WRITERS, _patch)


def _patch() -> None:
    kind = getattr(sys.modules.get(_WRITERS), "EventFileWriter", None)
    original = getattr(kind, "add_event", None)
    if kind is not None and original is not None and not hasattr(original, "__wrapped__"):
        ours = signal_handlers.gate(wrap_add_event(original))
        ours.__wrapped__ = original
        kind.add_event = ours


def wrap_add_event(original: Any) -> Any:
    """EventFileWriter.add_event."""

    def add_event(self: Any, event: Any) -> None:
        session = current()
        if session is None:
            original(self, event)
        elif session.mode.is_alone:
            if not _appends(self) and event.HasField("file_version"):
                name = getattr(self, "_file_name", "a file")
                session.training.report([], [f"TensorBoard continues in another file than the lost rank's: {name}"])
                original(self, event)  # each new file must begin with its version
        else:
            key = append_dedup.key_of(f"{getattr(self, '_file_name', '')}#events")
            append_dedup.write(session, key, b"+", lambda data: original(self, event) or len(data))

    return add_event


def _appends(writer: Any) -> bool:
    """Whether the lost rank had a file of this name; if so, the writer appends to it from now on."""
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
