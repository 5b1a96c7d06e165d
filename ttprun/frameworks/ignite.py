"""pytorch-ignite's Engine: one generator runs the epochs, one the batches, and its State holds the counters."""

from __future__ import annotations

FOLLOW = "ignite.engine.engine"
LEFT_OUT: dict[str, str] = {}
