"""When the optimizer was last updated: it decides whether device memory that failed can be repaired.

Of a multi-bit ECC error the device says when it happened. What failed since the newest update began has not got into a
state that was updated with it and handed on; what failed before may have. The rule is MindIO's (`_can_do_repair`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_TIME = re.compile(r"time us=\s*(\d+)")  # torch_npu's own pattern has a space there, MindIO's has none


def now_us() -> int:
    """The clock that stands for the device's: microseconds since 1970."""
    return time.time_ns() // 1000


def error_time_us(text: str) -> int | None:
    """When the error happened, by the device's clock, as its text says; None if it does not."""
    found = _TIME.search(text)
    return int(found.group(1)) if found else None


class UpdateTimes:
    """When the newest update of the optimizer began and ended, by the device's clock in microseconds; 0: not yet.

    While one is under way, `end_us` is that of the update before.

    clock_us   tells the time by the device's clock
    """

    def __init__(self, clock_us: Callable[[], int] = now_us) -> None:
        self.clock_us = clock_us
        self.start_us = 0
        self.end_us = 0

    def begin(self) -> None:
        """An update begins now."""
        self.start_us = self.clock_us()

    def end(self) -> None:
        """It has ended."""
        self.end_us = self.clock_us()

    def can_repair(self, error_us: int | None, start_us: int | None = None, end_us: int | None = None) -> bool:
        """Whether memory that failed then can be repaired: nothing wrong has got into a state that is kept.

        error_us          when it failed; None: not known
        start_us, end_us  of the newest update; None: as noted here
        """
        start = self.start_us if start_us is None else start_us
        end = self.end_us if end_us is None else end_us
        if not error_us or not start:
            return False
        return error_us > max(start, end) or start <= error_us <= end

    def is_repairable_by(self, text: str) -> bool:
        """The same of an error's text. A time that is still to come is another clock's, and proves nothing."""
        error_us = error_time_us(text)
        return error_us is not None and error_us <= self.clock_us() and self.can_repair(error_us)
