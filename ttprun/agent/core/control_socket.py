"""The control socket in the run directory: where other commands of ttprun ask. A request must carry the run's token.

Nothing that a client does may delay the supervisor, on whose selector this runs: no read or write waits, a client has
CLIENT_LIMIT_S seconds, and there are MOST_CLIENTS at most. Begin with `ControlSocket.accept`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.codec import Refused, decode_fields, encode
from ttprun.protocol.control_requests import Rejected, Reply, Request

KNOWN = {kind.__name__: kind for kind in get_args(Request)}
CLIENT_LIMIT_S = 2.0
MOST_CLIENTS = 16
_REQUEST_LIMIT_BYTES = 1 << 16
_BACKLOG = 64


@dataclass
class _Client:
    """Who has connected.

    unread   what it has said of its request so far
    ends_s   when it is hung up on
    """

    sock: socket.socket
    ends_s: float
    unread: bytes = b""


class ControlSocket:
    """Answers one JSON line with one JSON line, and hangs up.

    answer     called with a request whose token is right; what it returns is the reply; it must not block
    selector   whose keys' data are called when they are ready
    """

    def __init__(self, run: RunDirectory, answer: Callable[[Request], Reply], selector: selectors.BaseSelector) -> None:
        self._run = run
        self._token = run.read_token()
        self._answer = answer
        self._selector = selector
        self._clients: list[_Client] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        with run.control_address() as address:
            self._listener.bind(address)
            os.chmod(address, 0o600)
        self._listener.listen(_BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """A client is there. If there are too many, the one that has been silent for longest has to go."""
        with contextlib.suppress(OSError):  # it has gone already, or we have no descriptors left
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            client = _Client(sock, time.monotonic() + CLIENT_LIMIT_S)
            self._clients.append(client)
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))
        if len(self._clients) > MOST_CLIENTS:
            self._hang_up(self._clients[0])

    def pass_time(self) -> None:
        """Hang up on those that have had their time."""
        now_s = time.monotonic()
        while self._clients and self._clients[0].ends_s <= now_s:
            self._hang_up(self._clients[0])

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_REQUEST_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(client)
            return
        client.unread += data
        line, end, _ = client.unread.partition(b"\n")
        if not end and data and len(client.unread) < _REQUEST_LIMIT_BYTES:
            return
        with contextlib.suppress(OSError, ValueError):  # a reply that it does not take at once is not its to have
            client.sock.send(encode(self._reply(line)))
        self._hang_up(client)

    def _hang_up(self, client: _Client) -> None:
        self._clients.remove(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    def _reply(self, line: bytes) -> Reply:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):  # nested too deeply
            request = None
        if not isinstance(request, dict):
            return Rejected("a request is a JSON object in one line")
        token = str(request.get("token", "")).encode(errors="surrogatepass")
        if not hmac.compare_digest(token, self._token.encode()):
            return Rejected("the token is wrong")
        request.pop("token")
        decoded: Request | Refused = decode_fields(request, KNOWN)
        if isinstance(decoded, Refused):
            return Rejected(decoded.reason)
        try:
            return self._answer(decoded)
        except (ValueError, KeyError) as error:
            return Rejected(str(error))

    def close(self) -> None:
        """Stop listening, and hang up on all."""
        for client in list(self._clients):
            self._hang_up(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._run.control_socket.unlink()
