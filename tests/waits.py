"""Waits for descriptors, whatever their numbers: select() refuses those from 1024 on."""

from __future__ import annotations

import select

LIMIT_S = 100.0  # against hanging


def becomes_ready(fd: int, limit_s: float = LIMIT_S) -> bool:
    """Whether a descriptor can be read, has been hung up, or stands for a process that has ended, within a limit."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
