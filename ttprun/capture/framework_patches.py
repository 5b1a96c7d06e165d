"""Everything that ttprun changes in frameworks: one table, applied when the script has imported them.

Lightning's modules are there under two names, each with classes of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ttprun.capture.data import evaluations
from ttprun.capture.effects import csv_logs, script_files
from ttprun.introspect import fail_open
from ttprun.introspect.after_import import after_import


class _Row(NamedTuple):
    """One change.

    packages  of which one has the module
    module    in the package
    function  "Class.function" in it, or "function"
    wrap      given the original, returns ours
    """

    packages: str
    module: str
    function: str
    wrap: Callable[[Any], Any]


_FABRIC = "lightning.fabric lightning_fabric"
_TRAINER = "lightning.pytorch pytorch_lightning"
_TABLE = (
    _Row(_FABRIC, "loggers.csv_logs", "_ExperimentWriter.save", csv_logs.wrap_save),
    _Row(_FABRIC, "plugins.io.torch_io", "TorchCheckpointIO.save_checkpoint", script_files.leave_out_in_replay),
    _Row(_FABRIC, "plugins.io.torch_io", "TorchCheckpointIO.remove_checkpoint", script_files.leave_out_in_replay),
    _Row(_TRAINER, "loops.evaluation_loop", "_EvaluationLoop.run", evaluations.wrap_run),
    _Row(_TRAINER, "loops.evaluation_loop", "_EvaluationLoop.teardown", evaluations.wrap_teardown),
)
_ours: list[Any] = []


def follow() -> None:
    """Change them once the script has imported them."""
    for module in {f"{package}.{row.module}" for row in _TABLE for package in row.packages.split()}:
        after_import(module, functools.partial(_change, module))


def _change(module: str) -> None:
    for row in _TABLE:
        kind, _, name = row.function.rpartition(".")
        owner: Any = sys.modules.get(module)
        owner = getattr(owner, kind, None) if kind else owner
        if module not in (f"{package}.{row.module}" for package in row.packages.split()) or owner is None:
            continue
        original = vars(owner).get(name)
        if original is not None and original not in _ours:
            ours = functools.wraps(original)(fail_open.guard(f"{module}.{row.function}", original, row.wrap))
            _ours.append(ours)
            setattr(owner, name, ours)
