"""The launcher's side of the page (`--http [HOST]:PORT`) and of the health check: processes that serve an address.

No imports of the extra packages here. Begin with `serving`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from ttprun.errors import ConfigError
from ttprun.observe import console
from ttprun.observe.run_directory import RunDirectory

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


# A process beside the launcher that only reads the run directory: started in a session of its own, so that Ctrl-C is
# for the launcher, and ended by closing its standard input.


def start(module: str, *words: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m module words`. Raises OSError if there is no room for it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Let it come to its end, and wait until it is gone: `limit_s` seconds at most."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


logger = logging.getLogger("ttprun")

HEALTH_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"  # torch's agent reads it; its open release answers nothing
PROBES_ONLY = "--probes-only"
_NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
_INSTALL = "pip install 'ttprun[web]'"
_ANOTHER = "name another address, or :0 for a free port"
_END_LIMIT_S = 3.0


@contextlib.contextmanager
def serving(http: str | None, token_file: str | None, run: RunDirectory, name: str | None = None) -> Iterator[str]:
    """Serve the page of a run inside `with`, and say where; yields its address, "" if there is none.

    http        [HOST]:PORT; None: no page
    token_file  holds the token that readers must know if a host is named; None: a new one in the run directory
    name        by which others reach this machine; None: the one that it has

    Raises ConfigError, before anything is started, if that cannot be done.
    """
    if http is None:
        yield ""
        return
    token = _token_file(token_file, run) if parse_address(http).needs_token else None
    address, listener = listen(http)
    url = address.url(listener, name or socket.gethostname())
    shown = _shown(url, token)
    try:
        with _running("the page", run, listener, *([str(token)] if token else [])):
            console.say(shown, "INFO")
            yield url
    except OSError as error:
        raise ConfigError(f"--http: its process cannot be started ({error.strerror})", "leave it out") from None


def listen(http: str, option: str = "--http") -> tuple[Address, socket.socket]:
    """The address of a page, and a socket that listens there. Raises ConfigError, also if packages are missing."""
    if missing := [package for module, package in _NEEDED.items() if find_spec(module) is None]:
        raise ConfigError(f"{option} needs packages that are not installed ({', '.join(missing)})", _INSTALL)
    address = parse_address(http)
    try:
        return address, address.listen()
    except OSError as error:
        raise ConfigError(f"{option}: cannot listen on '{http}' ({error.strerror or error})", _ANOTHER) from None


def _shown(url: str, token_file: Path | None) -> str:
    """What is said of the page: to a person an address that works when it is clicked, once and then by a cookie.

    The token itself is written to a terminal only: what stderr goes to otherwise may be a log that others can read.
    """
    if token_file is None:
        return f"{url} shows this run (read only)"
    if not sys.stderr.isatty():
        return f"{url} shows this run (read only, with the token in {token_file}: ?token=...)"
    token = token_file.read_text(encoding="ascii").strip()
    return f"{url}?{urlencode({'token': token})} shows this run (read only; give nobody this address: it has the token)"


@contextlib.contextmanager
def answering_probes(environment: Mapping[str, str], run: RunDirectory) -> Iterator[int]:
    """Answer /healthz and /readyz, and nothing else, on the port that HEALTH_PORT_VARIABLE names, for all interfaces.

    Yields the port, 0 if there is none. As under torchrun, a port that cannot be had is reported and ends nothing.
    """
    named = environment.get(HEALTH_PORT_VARIABLE)
    if named is None:
        yield 0
        return
    with contextlib.ExitStack() as until_end:
        try:
            _, listener = listen(f"0.0.0.0:{named}", HEALTH_PORT_VARIABLE)
            port: int = listener.getsockname()[1]
            until_end.enter_context(_running("the health check", run, listener, PROBES_ONLY))
        except (ConfigError, OSError, ValueError) as error:
            logger.warning("%s=%s: no health check is answered (%s)", HEALTH_PORT_VARIABLE, named, error)
            port = 0
        yield port


@contextlib.contextmanager
def _running(what: str, run: RunDirectory, listener: socket.socket, *words: str) -> Iterator[None]:
    """The process that serves runs inside `with`; its end before is reported. Raises OSError if there is no room."""
    with listener:
        fd = listener.fileno()
        process = start("ttprun.web.server", str(run.path), str(fd), *words, pass_fds=[fd])
    is_wanted = threading.Event()
    is_wanted.set()
    threading.Thread(target=_say_end, args=(what, process, is_wanted), name="ttprun-http", daemon=True).start()
    try:
        yield
    finally:
        is_wanted.clear()
        end(process, _END_LIMIT_S)


def _say_end(what: str, process: subprocess.Popen[bytes], is_wanted: threading.Event) -> None:
    code = process.wait()
    if is_wanted.is_set():
        logger.warning("%s has ended (%d); the job continues", what, code)


def _token_file(named: str | None, run: RunDirectory) -> Path:
    """The file with the token, with mode 0600. Raises ConfigError if others could read it, or it is empty."""
    if named is None:
        fd = os.open(run.http_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="ascii") as new:
            new.write(secrets.token_hex(16))
        return run.http_token
    path = Path(os.path.expanduser(named)).absolute()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--http-token-file: '{named}' cannot be read ({error})", "name a file with one word"
        ) from None
    if mode & 0o077:
        raise ConfigError(f"--http-token-file: '{named}' is open to other users (mode {mode:04o})", "chmod 600 it")
    if len(text) < 16:
        raise ConfigError(f"--http-token-file: '{named}' holds less than 16 characters", "use a long random word")
    return path
