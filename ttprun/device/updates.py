"""The times of optimizer updates, which decide whether failed device memory can be repaired.

A multi-bit ECC error carries its time. Memory that failed after the newest update began cannot have corrupted the state
of an earlier update; memory that failed before may have. The rule is MindIO's (`_can_do_repair`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_clock_ns = time.time_ns  # the script's is recorded
_TIME = re.compile(r"time us=\s*(\d+)")  # torch_npu's own pattern has a space there, MindIO's has none


def now_us() -> int:
    """The clock used for the device's: microseconds since 1970."""
    return _clock_ns() // 1000


def error_time_us(text: str) -> int | None:
    """The time in an error's message, by the device's clock; None if it has none."""
    match = _TIME.search(text)
    return int(match.group(1)) if match else None


class UpdateTimes:
    """When the newest update of the optimizer began and ended, by the device's clock in microseconds; 0: not yet.

    During an update, `end_us` is that of the previous one.
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
        """Whether memory that failed at that time can be repaired: no kept state can be corrupted.

        error_us          when it failed; None: unknown
        start_us, end_us  of the newest update; None: as noted here
        """
        start = self.start_us if start_us is None else start_us
        end = self.end_us if end_us is None else end_us
        if not error_us or not start:
            return False
        return error_us > max(start, end) or start <= error_us <= end

    def is_repairable_by(self, text: str) -> bool:
        """Whether the memory that an error's message dates can be repaired. A time in the future proves nothing."""
        error_us = error_time_us(text)
        return error_us is not None and error_us <= self.clock_us() and self.can_repair(error_us)
