"""What can be asked for. All of it reads; the names are stable. Begin with `build`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from urllib.parse import urlencode

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ttprun.web import page
from ttprun.web.feed import Feed
from ttprun.web.metrics import RunCollector
from ttprun.web.readers import Access
from ttprun.web.summary import unix_s

Answer = Callable[[Request], Awaitable[Response]]
STALE_S = 30.0
_PAUSE_S = 0.5  # between two messages to one page
_PAUSE_PER_RANK_S = 0.0005
_COME_AGAIN_MS = 2000


def build(feed: Feed, token: str | None, is_for_probes: bool = False) -> ASGIApp:
    """The application that shows one run.

    feed                   what is known of the run; the caller runs its `follow`
    token, is_for_probes   as for `Access`
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(feed))

    async def index(_: Request) -> Response:
        return Response(page.live(), media_type="text/html", headers={"content-security-policy": page.policy()})

    async def healthz(_: Request) -> Response:
        is_alive = feed.status is None or (feed.status.state != "failed" and not _is_stale(feed))
        return PlainTextResponse("ok\n" if is_alive else "failed\n", status_code=200 if is_alive else 503)

    async def readyz(_: Request) -> Response:
        is_training = feed.status is not None and feed.status.state == "healthy" and not _is_stale(feed)
        is_ready = is_training and feed.status is not None and feed.status.step > 0
        return PlainTextResponse("ok\n" if is_ready else "not ready\n", status_code=200 if is_ready else 503)

    async def status(_: Request) -> Response:
        if feed.status is None:
            return _not_there("the run has no status yet")
        return Response(feed.status.to_json() + "\n", media_type="application/json")

    async def summary(_: Request) -> Response:
        return _not_there("the run has no status yet") if feed.summary is None else JSONResponse(asdict(feed.summary))

    async def incident(request: Request) -> Response:
        number = request.path_params["number"]
        wanted = next((past for past in feed.status.incidents if past.id == number), None) if feed.status else None
        if wanted is None:
            return _not_there(f"there is no incident {number}")
        events = [line.event for line in feed.lines if _belongs(line.event, number)]
        return JSONResponse(asdict(wanted) | {"events": events})

    async def events(request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(stream(feed, int(last) if last.isdecimal() else 0), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    def from_who_leads(answer: Answer) -> Answer:
        async def answer_or_redirect(request: Request) -> Response:
            place = feed.status.leaders_page if feed.status is not None else ""
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
        is_last, changed = feed.over.is_set(), feed.changed
        if feed.status is not None:
            if feed.status_json != shown_status:
                shown_status = feed.status_json
                yield _message("status", shown_status)
            if feed.topology_json != shown_topology:
                shown_topology = feed.topology_json
                yield _message("topology", shown_topology)
            if new := feed.history[points:]:
                points = len(feed.history)
                yield _message("history", json.dumps([[point.unix_s, point.step] for point in new]))
            for line in [line for line in feed.lines if line.end > after]:
                after = line.end
                yield _message("event", line.text, number=line.end)
        if is_last:
            yield _message("end", "{}")
            return
        ranks = feed.status.world_size if feed.status is not None else 0
        with suppress(TimeoutError):
            await asyncio.wait_for(feed.over.wait(), max(_PAUSE_S, ranks * _PAUSE_PER_RANK_S))
        await changed.wait()


def _message(kind: str, data: str, number: int | None = None) -> str:
    return f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "") + f"data: {data}\n\n"


def _belongs(event: dict[str, object], number: int) -> bool:
    return event.get("incident") == number or (event["event"] == "incident" and event.get("id") == number)


def _is_stale(feed: Feed) -> bool:
    """Whether a launcher that should write the status every half second has not done so for long."""
    if feed.status is None or feed.status.has_ended:
        return False
    return datetime.now(UTC).timestamp() - unix_s(feed.status.updated_at) > STALE_S


def _not_there(why: str) -> Response:
    return PlainTextResponse(why + "\n", status_code=404)
