"""Signals to the launcher: the first one ends the job with a grace period for the ranks, the second one at once.

torch's agent handles SIGTERM, SIGINT, SIGHUP and SIGQUIT: it passes them on to the ranks, waits (`--shutdown-timeout`),
and kills whoever is left. Two things are added. SIGUSR1, with which schedulers announce a time limit, is handled too:
torchrun dies of it and orphans its ranks. And whoever asks twice does not want to wait.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

ENDED_BY_SIGNAL = 128
# A scheduler that pre-empts a job, by whichever of the two, may start it again: both have the same exit code.
_EXIT_CODES = {signal.SIGUSR1: ENDED_BY_SIGNAL + signal.SIGTERM}


def exit_code_of(number: int) -> int:
    """The launcher's exit code when a signal has ended the job: 143 for SIGTERM and SIGUSR1, 130 for SIGINT."""
    return _EXIT_CODES.get(signal.Signals(number), ENDED_BY_SIGNAL + number)


class Signals:
    """Handlers of the launcher's main thread.

    note          called for the first signal, at once
    end_at_once   called for the second signal and any further one
    first         the signal that ends the job, None while there is none
    is_over       the job has ended: a signal has nothing left to interrupt but the clearing up
    """

    def __init__(self, signals_to_handle: str, note: Callable[[], None], end_at_once: Callable[[], None]) -> None:
        names = (name.strip() for name in signals_to_handle.split(","))
        handled = {signal.Signals[name] for name in names if name in signal.Signals.__members__}
        self._handled = handled | {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        self._note = note
        self._end_at_once = end_at_once
        self.first: signal.Signals | None = None
        self.is_over = False

    def install(self) -> None:
        """Take the place of whatever handles the signals now; torch puts its own handlers in with each group."""
        for number in self._handled:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None or self.is_over:
            self._end_at_once()
            return
        self.first = signal.Signals(number)
        self._note()
        raise SignalException(f"the launcher got {self.first.name}", sigval=self.first)
