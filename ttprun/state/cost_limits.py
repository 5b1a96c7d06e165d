"""What protection may cost, as people write it: how often a snapshot is taken, and how much memory mirrors may use.

A snapshot is taken every so many steps or seconds, or as often as pays.
Often enough to lose little, seldom enough to cost little: the best interval between two is about sqrt(2 C M) - C, for
a cost of C seconds a snapshot and a failure every M seconds (J. W. Young, "A first order approximation to the optimum
checkpoint interval", CACM 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 2006).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

SHORTEST_S = 15 * 60.0
LONGEST_S = 30 * 60.0
# What is taken for the time between two failures before any has been seen.
_FIRST_GUESS_S = 24 * 3600.0
_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?) ?(s|sec|min|m|h|steps?)")


@dataclass(frozen=True)
class SnapshotInterval:
    """Between two snapshots: steps or seconds, neither for `auto`, both None and `is_never` for none at all."""

    steps: int | None = None
    seconds: float | None = None
    is_never: bool = False

    @property
    def is_auto(self) -> bool:
        """They come as often as pays."""
        return self.steps is None and self.seconds is None and not self.is_never


def parse_interval(text: str) -> SnapshotInterval:
    """ "auto", "never", "500 steps", "20min", "90s". Raises ValueError ("what; cure")."""
    if text in ("auto", "never"):
        return SnapshotInterval(is_never=text == "never")
    match = _INTERVAL.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"'{text}' is not an interval; write 500steps, 20min, 90s, auto or never")
    if match[2].startswith("step"):
        if "." in match[1]:
            raise ValueError(f"'{text}' is not a whole number of steps; write 500steps")
        return SnapshotInterval(steps=int(match[1]))
    return SnapshotInterval(seconds=float(match[1]) * _UNITS_S[match[2]])


def best_interval_s(cost_s: float, run_s: float, failures: int) -> float:
    """Seconds between two snapshots, from SHORTEST_S to LONGEST_S.

    cost_s     what the last one took from the training
    run_s      how long the job has run
    failures   how many it has had in that time
    """
    between_failures_s = (run_s + _FIRST_GUESS_S) / (failures + 1)
    return min(max(math.sqrt(2 * cost_s * between_failures_s) - cost_s, SHORTEST_S), LONGEST_S)


# A limit for memory: so many bytes, or a share of what is free.


_UNITS_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(%|KiB|MiB|GiB|TiB|)")


def parse_memory(text: str) -> int | float:
    """Bytes (int), or a share from 0 to 1 (float): "4GiB", "500 MiB", "1000000", "25%", "0.25".

    Raises ValueError ("what; cure").
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is not None:
        number, unit = float(match[1]), match[2]
        is_share = unit == "%" or (not unit and "." in match[1])
        share = number / 100 if unit == "%" else number
        if is_share and share <= 1:
            return share
        if not is_share:
            return int(number * _UNITS_BYTES[unit])
    raise ValueError(f"'{text}' is not an amount of memory; write 4GiB, 500MiB, 25% or 0.25")


def in_words(size_bytes: float) -> str:
    """So many bytes, for people: "812 B", "3.4 KiB", "1.2 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    at = 0
    while size_bytes >= 1024 and at < len(units) - 1:
        size_bytes, at = size_bytes / 1024, at + 1
    return f"{size_bytes:.1f} {units[at]}" if at else f"{size_bytes:.0f} B"
