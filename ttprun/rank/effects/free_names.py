"""Names that a framework takes because they are free on the disk: a replacement takes those of the lost rank again.

Lightning gives a run's folder the next version that is free, and a checkpoint another name if its file is there. To a
replacement nothing looks free that its rank had taken. So a version that was chosen before the first step is kept in
the recorder (origins.py), and a checkpoint that was written after the boundary counts as not there: it is written
again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ttprun.rank import fail_open
from ttprun.rank.effects import csv_logs, files, origins
from ttprun.rank.process.after_import import after_import
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


_LOGGERS = ("csv_logs:CSVLogger", "tensorboard:TensorBoardLogger")
# (module, class, function, wrapper)
_CHANGES: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    *(
        (
            f"{package}.loggers.{logger.partition(':')[0]}",
            logger.partition(":")[2],
            "_get_next_version",
            wrap_next_version,
        )
        for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
        for logger in _LOGGERS
    ),
    *(
        (f"{package}.callbacks.model_checkpoint", "ModelCheckpoint", "file_exists", wrap_file_exists)
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    *(
        (f"{package}.loggers.csv_logs", "_ExperimentWriter", "save", csv_logs.wrap_save)
        for package in ("lightning.fabric", "lightning_fabric")
    ),
)


def follow() -> None:
    """Change them once the script has imported them."""
    for module in {change[0] for change in _CHANGES}:
        after_import(module, functools.partial(_change, module))


def _change(module: str) -> None:
    for name, kind, function, wrap in _CHANGES:
        owner = getattr(sys.modules.get(module), kind, None)
        original = vars(owner).get(function) if name == module and isinstance(owner, type) else None
        if original is not None and not hasattr(original, "__wrapped__"):
            ours = fail_open.guard(f"{module}.{kind}.{function}", original, wrap)
            setattr(owner, function, functools.wraps(original)(ours))
