"""Lightning's CSVLogger, which writes its file anew when a metric with a new name comes.

A row that the lost rank wrote after the boundary may have columns that the replacement has not met yet. So the writer
counts its rows, in an attribute that is recorded like its others, and a replacement first takes later rows away.
"""

from __future__ import annotations

import csv
import os
from typing import Any

from ttprun.capture.effects import append_dedup, script_files
from ttprun.capture.host import Host, current

_ROWS = "_ttprun_rows"


def wrap_save(original: Any) -> Any:
    """_ExperimentWriter.save."""

    def save(self: Any) -> None:
        session, new = current(), len(self.metrics)
        if session is not None and not session.mode.is_live:
            self.metrics = []  # the boundary's record says what stands in it, and what it has written
            return
        if session is not None and new and script_files.is_to_be_written_again(session, self.metrics_file_path):
            _take_away_later_rows(session, self)
        original(self)
        setattr(self, _ROWS, getattr(self, _ROWS, 0) + new)

    return save


def _take_away_later_rows(session: Host, writer: Any) -> None:
    path, count = writer.metrics_file_path, getattr(writer, _ROWS, 0)
    append_dedup.forget(session, path)
    if not count:
        os.remove(path)
        return
    with script_files.open_unfollowed(path, newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    with script_files.open_unfollowed(path, "w", newline="") as file:
        table = csv.DictWriter(file, writer.metrics_keys, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    if len(rows) < count:  # the lost rank was about to write it anew
        session.training.report([], [f"of {count} rows of {path} the lost rank has left {len(rows)}"])
