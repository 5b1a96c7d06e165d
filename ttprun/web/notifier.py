"""The process that runs the user's command for events: `python -m ttprun.web.notifier RUN_DIR OFFSET COMMAND KIND...`.

One command at a time, each for some seconds at most, and of a flood the newest; so it cannot fill the machine, and the
job never waits for it. It outlives the launcher by some seconds, to report its end. Begin with `Notifier.run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from ttprun.errors import ConfigError
from ttprun.observe.console import say
from ttprun.observe.events import read_on, timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status
from ttprun.web import companion, otel

# The launcher's side of `--on-event`: starts the process that runs the command, and ends it.


@contextlib.contextmanager
def notifying(command: str | None, kinds: Collection[str], run: RunDirectory) -> Iterator[None]:
    """Run a command of the user's for the events of a run that come inside `with`.

    command   a line for the shell; None: nothing is run
    kinds     of events, as `ttprun.observe.events` names them; others are left out

    At its end waits until the command was run for the last ones, END_LIMIT_S at most. Raises ConfigError if the process
    cannot be started.
    """
    if command is None:
        yield
        return
    offset = run.events.stat().st_size if run.events.exists() else 0  # what stands there is of an earlier launch
    try:
        process = companion.start("ttprun.web.notifier", str(run.path), str(offset), command, *kinds)
    except OSError as error:
        raise ConfigError(f"--on-event: its process cannot be started ({error.strerror})", "leave it out") from None
    try:
        yield
    finally:
        companion.end(process, END_LIMIT_S + 5.0)


def listeners(environment: Mapping[str, str]) -> Iterator[tuple[str | None, Collection[str]]]:
    """What else is to be run, as `notifying` takes it: what sends spans, and what other packages name.

    These have modules like ours as entry points `ttprun.listeners`; one that cannot be had is named, and left out.
    """
    yield otel.command_for(environment), otel.KINDS
    for entry in entry_points(group="ttprun.listeners"):
        try:
            listener = entry.load()
            yield listener.command_for(environment), listener.KINDS
        except Exception as error:
            say(f"no event is given to {entry.name} ({entry.value}): {type(error).__name__}: {error}")


@contextlib.contextmanager
def beside(config: Any, run: RunDirectory, name: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    """All that goes on beside a job inside `with`: its page, health check, and commands for events.

    config   of the job: `http`, `http_token_file`, `on_event`, `on_event_kinds`
    name     as for `serving`

    Yields the address of its page for readers on other machines, "" if there is none. Raises ConfigError, as these do.
    """
    with contextlib.ExitStack() as until_end:
        for command, kinds in ((config.on_event, config.on_event_kinds), *listeners(environment)):
            until_end.enter_context(notifying(command, kinds, run))
        page = until_end.enter_context(companion.serving(config.http, config.http_token_file, run, name))
        until_end.enter_context(companion.answering_probes(environment, run))
        yield "" if companion.is_loopback(urlsplit(page).netloc) else page


COMMAND_LIMIT_S = 10.0
END_LIMIT_S = 15.0  # for all that is left when the launcher has ended
MOST_WAITING = 20
_LOOK_EVERY_S = 0.5


class Namer:
    """Gives events their kinds: an incident is logged at each of its phases, and reported when it begins and ends."""

    def __init__(self) -> None:
        self._opened: set[object] = set()

    def kind_of(self, event: Mapping[str, Any]) -> str:
        """The kind of an event; "" for a phase in between."""
        if event["event"] != "incident":
            return str(event["event"])
        if event["outcome"] != "open":
            return "incident_ended"
        is_new = event["id"] not in self._opened
        self._opened.add(event["id"])
        return "incident_opened" if is_new else ""


class Notifier:
    """Follows the event log of a run.

    offset  where this launch begins in it
    kinds   which events the command is run for
    """

    def __init__(self, run: RunDirectory, offset: int, command: str, kinds: Collection[str]) -> None:
        self._run, self._command, self._kinds = run, command, kinds
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._namer = Namer()
        self._has_ended = self._has_warned = False
        self._read_to = offset

    def run(self) -> None:
        """Until standard input ends; then what is left, within END_LIMIT_S."""
        while not select.select([0], [], [], 0.0 if self._waiting else _LOOK_EVERY_S)[0]:
            self._look()
            self._report(COMMAND_LIMIT_S)
        give_up_at_s = time.monotonic() + END_LIMIT_S
        self._look()
        if not self._has_ended:
            self._take({"at": timestamp(), "event": "launcher_died"})
        while self._waiting and (left_s := give_up_at_s - time.monotonic()) > 0:
            self._report(min(left_s, COMMAND_LIMIT_S))

    def _look(self) -> None:
        """Take what was added to the log; the last line may still be written."""
        for end, line in read_on(self._run.events, self._read_to):
            self._read_to = end
            with suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        self._has_ended |= event["event"] == "run_ended"
        kind = self._namer.kind_of(event)
        if kind not in self._kinds:
            return
        self._waiting.append({"kind": kind, "run_dir": str(self._run.path), "event": event})
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1

    def _report(self, limit_s: float) -> None:
        """Run the command for the event that has waited longest."""
        if not self._waiting:
            return
        message = self._waiting.popleft() | {"dropped": self._dropped}
        with suppress(OSError, ValueError):
            status = read_status(self._run.status)
            message |= {"run_id": status.run_id, "host": status.host, "state": status.state, "step": status.step}
        self._dropped = 0
        why = ""
        try:
            code = run_command(self._command, json.dumps(message).encode() + b"\n", limit_s)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"no end after {limit_s:.0f} s"
        except OSError as error:
            why = error.strerror or str(error)
        if why and not self._has_warned:
            self._has_warned = True
            print(
                f"ttprun: '{self._command}', run for an event, has failed ({why}); the job continues", file=sys.stderr
            )


def run_command(command: str, given: bytes, limit_s: float) -> int:
    """Run a command of the user's in a shell, with `given` on its standard input; returns its exit code.

    command   a line for /bin/sh; its standard output is dropped
    given     one event: a line of JSON

    Blocks until the command has ended, at most `limit_s` seconds. Raises subprocess.TimeoutExpired after that; then it
    and what it has started are killed.
    """
    process = subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.communicate(given, timeout=limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
        process.wait()
    return process.returncode


def main() -> None:
    """Report events until the launcher has ended. Signals that end the job do not end this."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run_dir, offset, command, *kinds = sys.argv[1:]
    Notifier(RunDirectory(run_dir), int(offset), command, kinds).run()


if __name__ == "__main__":
    main()
