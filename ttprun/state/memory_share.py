"""A limit for memory as people write it: so many bytes, or a share of what is free. Begin with `parse_memory`."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?(%|KiB|MiB|GiB|TiB|)")


def parse_memory(text: str) -> int | float:
    """Bytes (int), or a share from 0 to 1 (float): "4GiB", "500 MiB", "1000000", "25%", "0.25".

    Raises ValueError ("what; cure").
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is not None:
        number, unit = float(match[1]), match[2]
        is_share = unit == "%" or (not unit and "." in match[1])
        share = number / 100 if unit == "%" else number
        if is_share and share <= 1:
            return share
        if not is_share:
            return int(number * _UNITS[unit])
    raise ValueError(f"'{text}' is not an amount of memory; write 4GiB, 500MiB, 25% or 0.25")


def in_words(size_bytes: float) -> str:
    """So many bytes, for people: "812 B", "3.4 KiB", "1.2 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    at = 0
    while size_bytes >= 1024 and at < len(units) - 1:
        size_bytes, at = size_bytes / 1024, at + 1
    return f"{size_bytes:.1f} {units[at]}" if at else f"{size_bytes:.0f} B"
