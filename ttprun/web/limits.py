"""What a client may cost: how many there may be, how long a request may take to arrive and an answer to be taken.

Nobody is locked out by others: when there are too many connections, the one that has waited longest for its own request
to arrive makes room. Begin with `LimitedProtocol`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MOST_CLIENTS = 128
HEADER_BYTES = 16 << 10
REQUEST_LIMIT_S = 10.0
ANSWER_LIMIT_S = 20.0
_LOOK_EVERY_S = 1.0


class LimitedProtocol(H11Protocol):
    """One connection, which counts among all.

    since_s   when it was last known to get on: connected, answering, or with nothing left to be taken
    """

    crowd: ClassVar[dict[LimitedProtocol, None]] = {}  # in the order in which they came
    since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(transport)
        if len(self.crowd) >= MOST_CLIENTS:
            oldest = next((other for other in self.crowd if not other.is_answering), next(iter(self.crowd)))
            oldest.drop()
        self.crowd[self] = None
        self.since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.crowd.pop(self, None)
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        """Whether a whole request has come, and its answer goes on."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def drop(self) -> None:
        """End it now, whatever was still to be sent."""
        self.crowd.pop(self, None)
        self.transport.abort()

    def look(self, now_s: float) -> None:
        """Drop it if it takes too long."""
        has_unsent = self.transport.get_write_buffer_size() > 0
        if self.is_answering and not has_unsent:
            self.since_s = now_s
        elif now_s - self.since_s > (ANSWER_LIMIT_S if has_unsent else REQUEST_LIMIT_S):
            self.drop()


async def watch() -> None:
    """Look after all connections, for ever."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now_s = asyncio.get_running_loop().time()
        for connection in list(LimitedProtocol.crowd):
            connection.look(now_s)
