"""The launcher's side of `--on-event`: starts the process that runs the command, and ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.web import helper
from ttprun.web.notifier import END_LIMIT_S


@contextlib.contextmanager
def notifying(command: str | None, kinds: Collection[str], run: RunDirectory) -> Iterator[None]:
    """Run a command of the user's for the events of a run that come inside `with`.

    command   a line for the shell; None: nothing is run
    kinds     of events, as `ttprun.web.kinds` names them; others are left out

    At its end waits until the command was run for the last ones, END_LIMIT_S at most. Raises ConfigError if the process
    cannot be started.
    """
    if command is None:
        yield
        return
    offset = run.events.stat().st_size if run.events.exists() else 0  # what stands there is of an earlier launch
    try:
        process = helper.start("ttprun.web.notifier", str(run.path), str(offset), command, *kinds)
    except OSError as error:
        raise ConfigError(f"--on-event: its process cannot be started ({error.strerror})", "leave it out") from None
    try:
        yield
    finally:
        helper.end(process, END_LIMIT_S + 5.0)
