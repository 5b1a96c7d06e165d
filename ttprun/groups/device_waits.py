"""torch.cuda.synchronize() as a wait for operations: the script may then use a result without having called `wait()`.

The device has no work left then; but a collective that was aborted has ended as well, and left garbage. So the
operations are waited for first. An event's `synchronize` says nothing of an operation that the script has not waited
for: its stream does not know of it.
"""

from __future__ import annotations

import threading
from typing import Any

from ttprun.device import accelerator
from ttprun.groups.host import current
from ttprun.groups.journal import Journal


def wrap_synchronize(original: Any) -> Any:
    """synchronize() of a device's module."""

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        _wait_for_operations()
        return original(*args, **kwargs)

    return synchronize


def _wait_for_operations() -> None:
    """Wait for what the script has issued on a device, through any number of recoveries."""
    session = current()
    if session is None or session.unprotected or threading.current_thread() is not threading.main_thread():
        return
    journal = session.get(Journal)
    if journal is None or accelerator.in_use() is None or not session.mode.is_live:
        return
    for entry in journal.unfinished():
        if entry.outputs and not entry.outputs[0].is_cpu:
            journal.wait(entry)
