"""A connection that is made while the supervisor's selector does other things."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable

Done = Callable[[socket.socket | None, int], None]


class Dial:
    """Connects to an address.

    done   called once, with the socket, or with None and why not (errno)
    """

    def __init__(self, selector: selectors.BaseSelector, address: str, port: int, limit_s: float, done: Done) -> None:
        self._selector = selector
        self._done = done
        self._ends_s = time.monotonic() + limit_s
        self._sock: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._code = self._sock.connect_ex((address, port))
        selector.register(self._sock, selectors.EVENT_WRITE, self._connected)

    @property
    def is_over(self) -> bool:
        """`done` has been called."""
        return self._sock is None

    def _connected(self) -> None:
        assert self._sock is not None
        self._end(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def look(self) -> None:
        """Time has passed."""
        if self._sock is not None and self._code not in (0, errno.EINPROGRESS):
            self._end(self._code)
        elif self._sock is not None and time.monotonic() >= self._ends_s:
            self._end(errno.ETIMEDOUT)

    def _end(self, code: int) -> None:
        assert self._sock is not None
        sock, self._sock = self._sock, None
        self._selector.unregister(sock)
        if code:
            sock.close()
        self._done(None if code else sock, code)
