"""Who may read: anybody on this machine by the loopback address; by a named host, only who knows the token.

`/healthz` and `/readyz` say one word, and that to anybody: a kubelet has no token. Begin with `Access.__call__`.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ttprun.web.address import is_loopback

_OPEN = ("/healthz", "/readyz")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Access:
    """ASGI middleware.

    token          None: no token is asked for, and requests must name this machine as the loopback address does, so
                   that a page of somebody else's cannot read this one through a name of its own (DNS rebinding)
    is_for_probes  nothing but `/healthz` and `/readyz` may be had, by anybody
    """

    def __init__(self, app: ASGIApp, token: str | None, is_for_probes: bool = False) -> None:
        self._app = app
        self._token = token
        self._is_for_probes = is_for_probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """What to answer in place of what was asked for, None if that may be had."""
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "this page only shows; ttprun's commands act", allow="GET, HEAD", connection="close")
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            return _plain(413, "a request has no body here", connection="close")
        if self._is_for_probes:
            return None if request.url.path in _OPEN else _plain(404, "only /healthz and /readyz are answered here")
        if self._token is None:
            if is_loopback(request.headers.get("host", "")):
                return None
            return _plain(403, "ask for localhost, or start ttprun with a host: --http HOST:PORT")
        if request.url.path in _OPEN:
            return None
        cookie = f"ttprun_{request.scope['server'][1]}"  # a browser sends those of other ports as well
        if self._is_right(request.query_params.get("token", "")):
            if request.url.path != "/":
                return None
            answer = RedirectResponse("/", status_code=303)  # so that it does not stay in the address
            answer.set_cookie(cookie, self._token, httponly=True, samesite="lax")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_right(bearer.strip()):
            return None
        if self._is_right(request.cookies.get(cookie, "")):
            return None
        return _plain(401, "a token is needed: ?token=..., or Authorization: Bearer", www_authenticate="Bearer")

    def _is_right(self, given: str) -> bool:
        assert self._token is not None
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def _plain(code: int, text: str, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return PlainTextResponse(text + "\n", status_code=code, headers=named)


# What a client may cost: how many there may be, how long a request may take to arrive and an answer to be taken.
#
# Nobody is locked out by others: when there are too many connections, the one that has waited longest for its own
# request to arrive makes room.


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
