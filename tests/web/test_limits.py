"""What a client may cost, with short limits, in a server inside this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.web.runs import status_of, write_run
from ttprun.web import server
from ttprun.web.companion import Address
from ttprun.web.server import Feed, build

LIMIT_S = 100
ASK = b"GET /api/status HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(server, "MOST_CLIENTS", 8)
    monkeypatch.setattr(server, "REQUEST_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(server, "ANSWER_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.1)
    feed = Feed(write_run(tmp_path / "run", status_of(ranks=40_000)))
    feed.look()
    config = uvicorn.Config(
        build(feed, None),
        http=server.LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        h11_max_incomplete_event_size=server.HEADER_BYTES,
        timeout_graceful_shutdown=1,
    )
    served = uvicorn.Server(config)

    async def serve() -> None:
        watching = asyncio.create_task(server.watch())
        await served.serve([listener])
        watching.cancel()

    with Address("", 0).listen() as listener:
        number = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        yield number
        served.should_exit = True
        thread.join(LIMIT_S)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LIMIT_S)


def is_answered(port: int) -> bool:
    with connect(port) as client:
        client.sendall(ASK)
        return client.recv(12) == b"HTTP/1.1 200"


def wait_for_end(client: socket.socket) -> bool:
    """Whether the server ends the connection."""
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


def test_whoever_comes_finds_room_however_many_only_hold_a_connection(port: int) -> None:
    idle = [connect(port) for _ in range(200)]

    assert is_answered(port)
    assert len(server.LimitedProtocol.crowd) <= 8
    for client in idle:
        client.close()


def test_a_request_that_does_not_arrive_in_time_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_LIMIT_S", 0.5)
    with connect(port) as client:
        client.sendall(ASK[:20])

        assert wait_for_end(client)


def test_bytes_that_trickle_in_do_not_prolong_the_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_LIMIT_S", 0.5)
    with connect(port) as client:
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 - a byte now and then, until it is refused
            for byte in ASK * 1000:
                client.sendall(bytes([byte]))
                client.settimeout(0.05)
                try:
                    if not client.recv(1):
                        raise ConnectionResetError("reset")
                except TimeoutError:
                    pass
        monkeypatch.setattr(server, "REQUEST_LIMIT_S", LIMIT_S)
        assert is_answered(port)


def test_who_does_not_take_an_answer_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_LIMIT_S", 1.0)
    with connect(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(ASK * 20)
        first = client.recv(12)
        while server.LimitedProtocol.crowd:
            threading.Event().wait(0.05)

        assert first == b"HTTP/1.1 200"


def test_a_header_without_end_is_refused(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 60_000)

        assert client.recv(12) == b"HTTP/1.1 400"
