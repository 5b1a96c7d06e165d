"""Records for tests: what a boundary of a script with no variables writes."""

from __future__ import annotations

from typing import Any

from ttprun.capture.records.packing import BoundaryRecord


def record_of(boundary: int = 1, **given: Any) -> BoundaryRecord:
    """A record of a script that is at line 3 of its file, with some other fields."""
    fields: dict[str, Any] = {
        "place": [["script.py", "<module>", 3]], "variables": [{}], "loops": [[]], "modules": {}, "optimizers": [],
        "stepped": [], "blobs": [], "unfollowed": "", "generator_loops": [], "rng": {}, "loaders": [], "results": [],
        "rebuilt": [], "files": [], "at_ns": 0, "has_steps": [], "weights": b"", "kept": False,
        "entropy": 0,
    }  # fmt: skip
    return BoundaryRecord(boundary=boundary, **fields | given)
