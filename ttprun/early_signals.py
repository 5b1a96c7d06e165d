"""Signals that come before the launcher can answer them: while torch is imported, which takes 2 to 40 s.

By default SIGUSR1 and SIGTERM would end the process at once, and a scheduler would read from its exit code that the job
has failed. Nothing has been started yet, so the launcher ends in order, with the exit code of one that was preempted.
`agent/launcher/signals.py` takes over before the first rank. Standard library only: it comes before any other import.
"""

from __future__ import annotations

import signal
from types import FrameType

ENDED_BY_SIGNAL = 128
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# A scheduler that preempts a job, by whichever of the two, may start it again: both have the same exit code.
_EXIT_CODES = {signal.SIGUSR1: ENDED_BY_SIGNAL + signal.SIGTERM}

_noted: list[int] = []


class StoppedEarly(SystemExit):
    """A signal has come before any rank was started. Not an Exception: what is imported must not answer it."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code_of(number))
        self.number = number
        self.reason = f"ended by {signal.Signals(number).name} before any rank was started"
        self.exit_code = exit_code_of(number)


def exit_code_of(number: int) -> int:
    """The launcher's exit code when a signal has ended the job: 143 for SIGTERM and SIGUSR1, 130 for SIGINT."""
    return _EXIT_CODES.get(signal.Signals(number), ENDED_BY_SIGNAL + number)


def listen() -> None:
    """Answer signals from now on, but not those that whoever has started us wants ignored (nohup)."""
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def look() -> None:
    """Raise StoppedEarly if a signal has come whose exception was lost, as in the middle of a destructor."""
    if _noted:
        raise StoppedEarly(_noted[0])


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
    if len(_noted) == 1:  # a scheduler asks more than once, and the end must not be interrupted
        raise StoppedEarly(number)
