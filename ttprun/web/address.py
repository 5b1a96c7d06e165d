"""Where the page is served: `--http [HOST]:PORT`. No imports of the extra packages here."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_FORM = re.compile(r"^(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:/\[\]]*)):(?P<port>\d{1,5})$")


@dataclass(frozen=True)
class Address:
    """host   "" if none was named: loopback, and no token is asked for
    port   0: a free one
    """

    host: str
    port: int

    @property
    def needs_token(self) -> bool:
        """Whether readers must know the token."""
        return bool(self.host)

    def listen(self) -> socket.socket:
        """A socket that listens there. Raises OSError if the host is not known, or the port is in use."""
        host = self.host or LOOPBACK
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    def url(self, listener: socket.socket, name: str) -> str:
        """What to type into a browser: `http://127.0.0.1:41233/`.

        name   of this machine, which stands for all of its interfaces
        """
        host, port = listener.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = name
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def parse_address(text: str) -> Address:
    """Read `[HOST]:PORT`. Raises ValueError, "what; cure", if it is something else."""
    match = _FORM.match(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"'{text}' is no address; write [HOST]:PORT, such as :8080, or :0 for a free port")
    return Address(match["ipv6"] or match["host"] or "", int(match["port"]))


def is_loopback(place: str) -> bool:
    """Whether HOST:PORT, as a request or an address names it, can be reached from this machine alone."""
    try:
        name = urlsplit(f"//{place}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
