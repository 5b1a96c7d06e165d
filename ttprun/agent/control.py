"""The control socket in the run directory: where other commands of ttprun ask. A request must carry the run's token."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
from collections.abc import Callable

from ttprun.channel import Message
from ttprun.observe.run_directory import RunDirectory

_REQUEST_LIMIT_S = 2.0
_REQUEST_LIMIT_BYTES = 1 << 16


class ControlSocket:
    """Answers one JSON line with one JSON line.

    answer   called with a request whose token is right; what it returns is the reply
    """

    def __init__(self, run: RunDirectory, answer: Callable[[Message], Message]) -> None:
        self._run = run
        self._token = run.read_token()
        self._answer = answer
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with run.control_address() as address:
            self.listener.bind(address)
            os.chmod(address, 0o600)
        self.listener.listen(8)

    def accept(self) -> None:
        """A client is there: answer it and hang up. A client that is slow or wrong cannot hurt."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            client, _ = self.listener.accept()
            with client:
                client.settimeout(_REQUEST_LIMIT_S)
                with client.makefile("rwb") as stream:
                    reply = self._reply(stream.readline(_REQUEST_LIMIT_BYTES))
                    stream.write(json.dumps(reply).encode() + b"\n")

    def _reply(self, line: bytes) -> Message:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"ok": False, "error": "a request is a JSON object"}
        token = str(request.get("token", "")).encode(errors="surrogatepass")
        if not hmac.compare_digest(token, self._token.encode()):
            return {"ok": False, "error": "the token is wrong"}
        if request.get("op") not in ("inject_fault", "checkpoint", "recall"):
            return {"ok": False, "error": f"there is no request {request.get('op')!r}"}
        try:
            return self._answer(request)
        except (ValueError, KeyError) as error:
            return {"ok": False, "error": str(error)}

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()
        with contextlib.suppress(OSError):
            self._run.control_socket.unlink()
