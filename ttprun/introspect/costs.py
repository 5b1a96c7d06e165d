"""What we take of a step on the thread that trains: measured in some steps, published, and reported once if it is much.

A step is measured from boundary to boundary, about one in eight, so that measuring costs nothing in the others. Times
are of the thread's processor; where a device is in use, what we wait for it counts, too. Begin with `Costs.begin`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

PARTS = ("record", "commit", "collectives", "data", "copies", "checks")
RECORD, COMMIT, COLLECTIVES, DATA, COPIES, CHECKS = range(len(PARTS))
_APART = 5  # steps between two that are measured, and up to _DRAWN more: never in time with what comes every N steps
_DRAWN = 7
_FIRST = 20  # steps that make what later ones use again are not measured
_WEIGHT = 0.25  # of the newest measurement in the average
_TRUSTED = 6  # measurements, from which on the average says whether the budget is kept
LEAST_S = 0.3e-3  # what may be taken of the shortest step


class Costs:
    """Of one rank.

    is_on   this step is measured
    now     the clock: nanoseconds
    """

    __slots__ = ("_average", "_began", "_cells", "_counted", "_next", "_spent", "is_on", "now")

    def __init__(self, cells: Any = None) -> None:
        """The cells are where averages are published: the step's, then those of PARTS (int64, ns); None: nowhere."""
        self._cells = cells
        self.is_on = False
        self.now: Callable[[], int] = time.thread_time_ns
        self._spent = [0] * len(PARTS)
        self._average: list[float] = []
        self._began = 0
        self._next = _FIRST
        self._counted = 0

    def begin(self, step: int, is_on_device: Callable[[], bool]) -> None:
        """A boundary: a measured step ends here, or one begins.

        is_on_device   asked of a step that is measured: whether a device is in use
        """
        if self.is_on:
            self._end()
            self._next = step + _APART + step * 2654435761 % _DRAWN
            self.is_on = False
        elif step >= self._next:
            self.now = time.perf_counter_ns if is_on_device() else time.thread_time_ns
            self._spent = [0] * len(PARTS)
            self._began = time.perf_counter_ns()
            self.is_on = True

    def add(self, part: int, since: int) -> None:
        """What was done since `since` by the clock `now` was ours, and for this part; call it only if `is_on`."""
        self._spent[part] += self.now() - since

    def add_rest(self, part: int, since: int, inner: tuple[int, ...]) -> None:
        """As `add`, without what was added for these parts since then, for the first time in the step."""
        self._spent[part] += self.now() - since - sum(self._spent[inside] for inside in inner)

    def leave_out(self, part: int, since: int) -> None:
        """What was done since then, within what is added, was not ours."""
        self._spent[part] -= self.now() - since

    def _end(self) -> None:
        times = [time.perf_counter_ns() - self._began, *self._spent]
        if not self._average:
            self._average = list(map(float, times))
        self._average = [old + (new - old) * _WEIGHT for old, new in zip(self._average, times, strict=True)]
        self._counted += 1
        if self._cells is not None:
            for at, value in enumerate(self._average):
                self._cells[at] = round(value)

    def over(self, share: float) -> str:
        """How the budget is exceeded, as a sentence; "" if it is kept, or not enough is known.

        share   of the step that may be taken; 0: all
        """
        if not share or self._counted < _TRUSTED:
            return ""
        step, *parts = (spent_ns / 1e9 for spent_ns in self._average)
        taken = sum(parts)
        if taken <= max(share * step, LEAST_S):
            return ""
        most = max(range(len(PARTS)), key=parts.__getitem__)
        return (
            f"protection takes {taken * 1e3:.1f} ms of a step of {step * 1e3:.1f} ms ({taken / step:.1%}; the budget "
            f"is {share:.1%}), {parts[most] * 1e3:.1f} ms of it for {_SHOWN[PARTS[most]]}; what helps: 'What a step "
            "costs' in 'ttprun guide limits'"
        )


def measured(part: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: what a function does is ours, and for this part; its first argument has `costs`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(host: Any, *args: Any, **kwargs: Any) -> Any:
            costs = host.costs
            if not costs.is_on:
                return function(host, *args, **kwargs)
            since = costs.now()
            try:
                return function(host, *args, **kwargs)
            finally:
                costs.add(part, since)

        return inner

    return decorate


_SHOWN = {
    "record": "the record of the script's state",
    "commit": "the commit",
    "collectives": "collectives",
    "data": "the batches of DataLoaders",
    "copies": "copies of weights and state",
    "checks": "comparisons",
}
