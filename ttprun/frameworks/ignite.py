"""pytorch-ignite's Engine: one generator runs the epochs, one the batches, and its State holds the counters."""

from __future__ import annotations

FOLLOW = "ignite.engine.engine"
LEFT_OUT = {
    # Of an evaluator: what its newest run was given, until the next one. A replay may pass over all of its runs.
    "ignite.engine.events:State": "dataloader",
}
