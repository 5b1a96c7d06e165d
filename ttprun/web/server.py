"""The process that serves the page: `python -m ttprun.web.server RUN_DIR LISTENER [TOKEN_FILE | --probes-only]`.

It ends with its standard input, a pipe from the launcher, and with the launcher in any case (PR_SET_PDEATHSIG). Signals
that end the job come to all of its processes under Slurm; this one shows how the job is saved, so they do not end it.
Begin with `build`, which says what can be asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import ClassVar
from urllib.parse import urlencode

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ttprun.errors import ConfigError
from ttprun.observe.events import unix_s
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.run_view import RunView
from ttprun.observe.status import RunStatus
from ttprun.web import page
from ttprun.web.companion import PROBES_ONLY, is_loopback
from ttprun.web.metrics import RunCollector, StepTimes

# Who may read: anybody on this machine by the loopback address; by a named host, only who knows the token. `/healthz`
# and `/readyz` say one word, and that to anybody: a kubelet has no token.

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
        self._app, self._token, self._is_for_probes = app, token, is_for_probes

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
            is_here = is_loopback(request.headers.get("host", ""))
            return None if is_here else _plain(403, "ask for localhost, or start ttprun with a host: --http HOST:PORT")
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
        is_named = scheme.lower() == "bearer" and self._is_right(bearer.strip())
        if is_named or self._is_right(request.cookies.get(cookie, "")):
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


# What can be asked for. All of it reads; the names are stable.


Answer = Callable[[Request], Awaitable[Response]]
STALE_S = 30.0
_PAUSE_S = 0.5  # between two messages to one page
_PAUSE_PER_RANK_S = 0.0005
EVERY_S = 0.5
_SHARE = 20  # a look takes at most a part of the time: for thousands of ranks it comes less often
_COME_AGAIN_MS = 2000


class Feed:
    """What a run has written so far, read once for all clients.

    view       None until the run has a status
    status_json    the status and what it comes to, made once for all pages
    step_times of this launch, since the page is served
    changed    set, and replaced, whenever something is new
    over       set when nothing comes any more
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.view: RunView | None = None
        self.status_json = ""
        self.step_times = StepTimes()
        self.changed = asyncio.Event()
        self.over = asyncio.Event()

    async def follow(self) -> None:
        """Look at the files until it is over."""
        while not self.over.is_set():
            began_s = time.monotonic()
            self.look()
            await asyncio.sleep(max(EVERY_S, _SHARE * (time.monotonic() - began_s)))

    def end(self) -> None:
        """The launcher is about to end: what is in the files now is the last."""
        self.over.set()
        self.look()
        self._wake()

    def look(self) -> None:
        """Read what is new."""
        with suppress(ConfigError):  # tried again at the next look
            if self.view is None:
                self.view = RunView(self._run)
            elif not self.view.look(always=self.over.is_set()):
                return
        if self.view is None:
            return
        status, summary = self.view.status, self.view.summary
        self.step_times.note(status)
        self.status_json = f'{{"status": {status.to_json()}, "summary": {json.dumps(asdict(summary))}}}'
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def build(feed: Feed, token: str | None, is_for_probes: bool = False) -> ASGIApp:
    """The application that shows one run.

    feed                   what is known of the run; the caller runs its `follow`
    token, is_for_probes   as for `Access`
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(lambda: feed.view, feed.step_times))

    async def index(_: Request) -> Response:
        return Response(page.live(), media_type="text/html", headers={"content-security-policy": page.policy()})

    async def healthz(_: Request) -> Response:
        is_alive = feed.view is None or (feed.view.status.state != "failed" and not _is_stale(feed.view.status))
        return PlainTextResponse("ok\n" if is_alive else "failed\n", status_code=200 if is_alive else 503)

    async def readyz(_: Request) -> Response:
        now = None if feed.view is None else feed.view.status
        is_ready = now is not None and now.state == "healthy" and not _is_stale(now) and now.step > 0
        return PlainTextResponse("ok\n" if is_ready else "not ready\n", status_code=200 if is_ready else 503)

    async def status(_: Request) -> Response:
        if feed.view is None:
            return _not_there("the run has no status yet")
        return Response(feed.view.status.to_json() + "\n", media_type="application/json")

    async def summary(_: Request) -> Response:
        return _not_there("the run has no status yet") if feed.view is None else JSONResponse(asdict(feed.view.summary))

    async def incident(request: Request) -> Response:
        number = request.path_params["number"]
        wanted = next((past for past in feed.view.status.incidents if past.id == number), None) if feed.view else None
        if feed.view is None or wanted is None:
            return _not_there(f"there is no incident {number}")
        events = [
            event
            for event in (line.event for line in feed.view.lines)
            if event.get("incident") == number or (event["event"] == "incident" and event.get("id") == number)
        ]
        return JSONResponse(asdict(wanted) | {"events": events})

    async def events(request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(stream(feed, int(last) if last.isdecimal() else 0), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    def from_who_leads(answer: Answer) -> Answer:
        async def answer_or_redirect(request: Request) -> Response:
            place = feed.view.status.leaders_page if feed.view is not None else ""
            if not place:
                return await answer(request)
            proof = f"?{urlencode({'token': token})}" if token else ""  # who is let in here has given it
            return RedirectResponse(place.rstrip("/") + request.url.path + proof)

        return answer_or_redirect

    of_the_job = {
        "/": index,
        "/api/status": status,
        "/api/summary": summary,
        "/api/incidents/{number:int}": incident,
        "/api/events": events,
    }
    of_this_node = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
    routes = {path: from_who_leads(answer) for path, answer in of_the_job.items()} | of_this_node
    return Access(Starlette(routes=[Route(path, answer) for path, answer in routes.items()]), token, is_for_probes)


async def stream(feed: Feed, after: int) -> AsyncIterator[str]:
    """Server-sent events: what there is, then what comes, until the run ends.

    after   the number of the last line of the event log that the client has got, 0 for none

    "status" has the status and the summary, "topology" who holds what, "history" [[unix_s, step], ...] since the last
    one, "event" a line of the event log, "end" is the last.
    """
    yield f"retry: {_COME_AGAIN_MS}\n\n"
    shown_status = shown_topology = ""
    points = 0
    while True:
        is_last, changed, view = feed.over.is_set(), feed.changed, feed.view
        if view is not None:
            if feed.status_json != shown_status:
                shown_status = feed.status_json
                yield _message("status", shown_status)
            if view.topology_json != shown_topology:
                shown_topology = view.topology_json
                yield _message("topology", shown_topology)
            if new := view.history[points:]:
                points = len(view.history)
                yield _message("history", json.dumps([[point.unix_s, point.step] for point in new]))
            for line in [line for line in view.lines if line.end > after]:
                after = line.end
                yield _message("event", line.text, number=line.end)
        if is_last:
            yield _message("end", "{}")
            return
        ranks = view.status.world_size if view is not None else 0
        with suppress(TimeoutError):
            await asyncio.wait_for(feed.over.wait(), max(_PAUSE_S, ranks * _PAUSE_PER_RANK_S))
        await changed.wait()


def _message(kind: str, data: str, number: int | None = None) -> str:
    return f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "") + f"data: {data}\n\n"


def _is_stale(status: RunStatus) -> bool:
    """Whether a launcher that should write the status every half second has not done so for long."""
    return not status.has_ended and datetime.now(UTC).timestamp() - unix_s(status.updated_at) > STALE_S


def _not_there(why: str) -> Response:
    return PlainTextResponse(why + "\n", status_code=404)


_PR_SET_PDEATHSIG = 1
_NICE = 10  # the ranks come first
_END_LIMIT_S = 1


class Server(uvicorn.Server):
    """uvicorn's, which no signal ends."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing: the launcher says when."""


async def serve(run: RunDirectory, listener: socket.socket, token: str | None, is_for_probes: bool) -> None:
    """Serve a run until standard input ends.

    listener               a bound TCP socket
    token, is_for_probes   as for `Access`
    """
    feed = Feed(run)
    config = uvicorn.Config(
        build(feed, token, is_for_probes),
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=_END_LIMIT_S,
    )
    server = Server(config)

    def end() -> None:
        if not os.read(0, 1):
            asyncio.get_running_loop().remove_reader(0)
            feed.end()
            server.should_exit = True

    asyncio.get_running_loop().add_reader(0, end)
    beside = [asyncio.create_task(feed.follow()), asyncio.create_task(watch())]
    await server.serve([listener])
    for task in beside:
        task.cancel()


def main() -> None:
    """Serve until the launcher ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICE)
    run_dir, listener, *readers = sys.argv[1:]
    is_for_probes = readers == [PROBES_ONLY]
    token = Path(readers[0]).read_text(encoding="ascii").strip() if readers and not is_for_probes else None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    asyncio.run(serve(RunDirectory(run_dir), socket.socket(fileno=int(listener)), token, is_for_probes))


if __name__ == "__main__":
    main()
