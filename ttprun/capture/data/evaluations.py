"""Lightning's evaluation loop, which keeps the iterator over its loader until the next evaluation.

A replay passes over earlier evaluations, or has run the sanity check alone, which is shorter. So what an evaluation has
used is dropped when it is over, as it would be by the next one: between evaluations there is nothing to restore.
"""

from __future__ import annotations

from typing import Any


def wrap_run(original: Any) -> Any:
    """_EvaluationLoop.run."""

    def run(self: Any) -> Any:
        outputs = original(self)
        self._data_fetcher = None
        if self._combined_loader is not None:
            self._combined_loader._iterator = None
        return outputs

    return run


def wrap_teardown(original: Any) -> Any:
    """_EvaluationLoop.teardown, which ends the loaders' workers by way of what was dropped."""

    def teardown(self: Any) -> None:
        original(self)
        if self._combined_loader is not None:
            self._combined_loader.reset()

    return teardown
