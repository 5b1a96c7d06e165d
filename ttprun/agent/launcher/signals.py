"""Signals to the launcher: they end the job, and its state is saved first.

torch's agent handles SIGTERM, SIGINT, SIGHUP and SIGQUIT: it passes them on to the ranks, waits (`--shutdown-timeout`),
and kills whoever is left. Three things are added. SIGUSR1, with which schedulers announce a time limit, is handled too:
torchrun dies of it and orphans its ranks. A scheduler asks more than once (Slurm's SIGTERM goes to all processes and to
the batch shell, which passes on one of its own): that is the same request. Only a person who presses Ctrl-C again does
not want to wait. And behind SIGTERM comes SIGKILL: by then all is over (`grace_s`).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from ttprun import early_signals

_TO_END_S = 5.0  # of the grace time, for the ranks and then the launcher to end once the state is saved
_SAME_PRESS_S = 0.2  # the terminal signals the launcher, and whatever has started it passes that on


class Signals:
    """Handlers of the launcher's main thread.

    grace_s       seconds from SIGTERM to the scheduler's SIGKILL; None: not known
    note          called for the first signal, at once
    end_at_once   called when a person presses Ctrl-C for the second time
    first         the signal that ends the job, None while there is none
    is_over       the job has ended: a signal has nothing left to interrupt but the clearing up
    """

    def __init__(
        self,
        signals_to_handle: str,
        grace_s: float | None,
        note: Callable[[], None],
        end_at_once: Callable[[], None],
    ) -> None:
        names = (name.strip() for name in signals_to_handle.split(","))
        handled = {signal.Signals[name] for name in names if name in signal.Signals.__members__}
        self._handled = handled | {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        self._grace_s = math.inf if grace_s is None else grace_s
        self._note = note
        self._end_at_once = end_at_once
        self._killed_at_s = math.inf
        self._interrupts_s: list[float] = []
        self.first: signal.Signals | None = None
        self.is_over = False

    def install(self) -> None:
        """Take the place of whatever handles the signals now; torch puts its own handlers in with each group.

        Raises StoppedEarly if a signal has come before.
        """
        for number in self._handled:
            signal.signal(number, self._on_signal)
        early_signals.look()

    def left_s(self) -> float:
        """Seconds until the scheduler kills this process, inf if nobody has said that it will."""
        return self._killed_at_s - time.monotonic()

    def left_to_save_s(self) -> float:
        """Seconds for saving, so that the ranks can still end in order; inf as `left_s`."""
        return self.left_s() - min(_TO_END_S, self._grace_s / 2)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGTERM:
            self._killed_at_s = min(self._killed_at_s, now_s + self._grace_s)
        if number == signal.SIGINT and (not self._interrupts_s or now_s - self._interrupts_s[-1] > _SAME_PRESS_S):
            self._interrupts_s.append(now_s)
        if len(self._interrupts_s) > 1:
            self._end_at_once()
        if self.first is not None or self.is_over:
            return
        self.first = signal.Signals(number)
        self._note()
        raise SignalException(f"the launcher got {self.first.name}", sigval=self.first)
