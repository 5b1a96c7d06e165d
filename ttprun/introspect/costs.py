"""What we take of a step on the thread that trains: measured in some steps, published, and reported once if it is much.

A step is measured from boundary to boundary, about one in eight, so that measuring costs nothing in the others. Times
are of the thread's processor; where a device is in use, what we wait for it counts, too. The record of a step, which
can be as dear as the script's objects are many, is measured in each step, and has a ceiling. Begin with `Costs.begin`,
and with `Ceiling.note`.
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
_IN_ANY_CASE_S = 1e-3  # what a part takes of a step that has little for it to do: nothing helps against that
SHARE_OF_RECORD = 0.15  # of a step's other time that its record may take, whatever the budget
LEAST_OF_RECORD_NS = 10_000_000  # what it may take of the shortest step: else a busy machine would choose
_IN_A_ROW = 3  # records above the ceiling, from which on something is left out of them
_TOO_MUCH = 60  # ceilings of debt, from which on it is: what has changed is walked over for 16 records in any case
_MOST_DEBT = 80  # ceilings: what was taken long ago counts no more


class Ceiling:
    """What the record may take of the steps: on average 15 % of their other time, and 10 ms of a short one.

    A record above it leaves a debt, which cheaper ones pay back: a dear one now and then is none.

    prices   of the variables, as the record's walk measures them; None: they are not measured
    """

    __slots__ = ("_before", "_dear", "_debt", "prices")

    def __init__(self) -> None:
        self.prices: list[Any] | None = None
        self._before = self._debt = self._dear = 0

    def note(self, taken_ns: int, budget: float) -> tuple[int, int] | None:
        """A record was written. Returns how many ns later ones must take less, and what is worth leaving out for it.

        That is half the ceiling, or 5 % of a long step, and the less the more the record takes. None: all is well.

        taken_ns   of the thread's processor: what else runs on the machine does not count
        budget     share of the step that it may take if that is more; 0: all of it
        """
        now = time.perf_counter_ns()
        others_ns, self._before = now - self._before - taken_ns, now
        if not budget or (taken_ns <= LEAST_OF_RECORD_NS and not self._debt):
            return None
        ceiling = max(round(max(budget, SHARE_OF_RECORD) * others_ns), LEAST_OF_RECORD_NS)
        above = taken_ns - ceiling
        self._debt = max(0, min(self._debt + above, _MOST_DEBT * ceiling))
        if not self._debt:
            self._dear, self.prices = 0, None
            return None
        self._dear += above > 0
        if above > 0 and self._dear >= _IN_A_ROW and self._debt >= _TOO_MUCH * ceiling and self.prices:
            self._dear = 0
            return above, ceiling * ceiling // (2 * taken_ns)
        self.prices = []
        return None


class Costs:
    """Of one rank.

    is_on   this step is measured
    now     the clock: nanoseconds
    ceiling of the record
    """

    __slots__ = ("_average", "_began", "_cells", "_counted", "_next", "_spent", "ceiling", "is_on", "now")

    def __init__(self, cells: Any = None) -> None:
        """The cells are where averages are published: the step's, then those of PARTS (int64, ns); None: nowhere."""
        self._cells = cells
        self.ceiling = Ceiling()
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
        """How the budget is exceeded, and what helps; "" if it is kept, nothing helps, or not enough is known.

        share   of the step that may be taken; 0: all
        """
        if not share or self._counted < _TRUSTED:
            return ""
        step, *parts = (spent_ns / 1e9 for spent_ns in self._average)
        taken = sum(parts)
        if taken <= max(share * step, LEAST_S):
            return ""
        most = max(range(len(PARTS)), key=parts.__getitem__)
        shown, cure = _SHOWN[PARTS[most]]
        if not cure or parts[most] < _IN_ANY_CASE_S:
            return ""
        return (
            f"protection takes {taken * 1e3:.1f} ms of a step of {step * 1e3:.1f} ms ({taken / step:.1%}; the budget "
            f"is {share:.1%}), {parts[most] * 1e3:.1f} ms of it for {shown}; what helps: {cure}"
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
    "record": ("the record of the script's state", "fewer objects that change at each step, or arrays in their place"),
    "commit": ("the commit", ""),
    "collectives": ("collectives", "fewer and larger ones (DDP's bucket_cap_mb)"),
    "data": ("the batches of DataLoaders", ""),
    "copies": ("copies of weights and state", "no --keep-steps; --buddy off, where a restart from a snapshot will do"),
    "checks": ("comparisons", "a larger --verify-every, or --on-nan warn"),
}
