"""pytorch-ignite's Engine: one generator runs the epochs, one the batches, and its State holds the counters.

The whole package: `create_supervised_trainer` keeps the loss of a step in a function of its `__init__.py`.
"""

from __future__ import annotations

FOLLOW = "ignite.engine"
LEFT_OUT = {
    # Of an evaluator: what its newest run was given, until the next one. A replay may pass over all of its runs.
    "ignite.engine.events:State": "dataloader",
}
