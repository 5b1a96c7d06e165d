"""The launcher's side of the page: takes the address, starts the process that serves it, and ends it.

Nothing here waits for that process while the job runs, and its end is no more than a line on the console. No imports of
the extra packages. Begin with `serving`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.web import helper
from ttprun.web.address import parse_address

logger = logging.getLogger("ttprun")

_NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
_INSTALL = "pip install 'ttprun[web]'"
_ANOTHER = "name another address, or :0 for a free port"
_END_LIMIT_S = 3.0


@contextlib.contextmanager
def serving(http: str | None, token_file: str | None, run: RunDirectory) -> Iterator[str]:
    """Serve the page of a run inside `with`, and say where; yields its address, "" if there is none.

    http        [HOST]:PORT; None: no page
    token_file  holds the token that readers must know if a host is named; None: a new one in the run directory

    Raises ConfigError, before anything is started, if that cannot be done.
    """
    if http is None:
        yield ""
        return
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(f"--http needs packages that are not installed ({', '.join(missing)})", _INSTALL)
    address = parse_address(http)
    token = _token_file(token_file, run) if address.needs_token else None
    try:
        listener = address.listen()
    except OSError as error:
        raise ConfigError(f"--http: cannot listen on '{http}' ({error.strerror or error})", _ANOTHER) from None
    how = f" (read only, with the token in {token}: ?token=...)" if token else " (read only)"
    with listener:
        process = _start(run, listener, token)
        url = address.url(listener)
    print(f"ttprun: {url} shows this run{how}", file=sys.stderr, flush=True)
    is_wanted = threading.Event()
    is_wanted.set()
    threading.Thread(target=_say_end, args=(process, is_wanted), name="ttprun-http", daemon=True).start()
    try:
        yield url
    finally:
        is_wanted.clear()
        helper.end(process, _END_LIMIT_S)


def _start(run: RunDirectory, listener: socket.socket, token: Path | None) -> subprocess.Popen[bytes]:
    fd = listener.fileno()
    words = [str(run.path), str(fd), *([str(token)] if token else [])]
    try:
        return helper.start("ttprun.web.server", *words, pass_fds=[fd])
    except OSError as error:
        raise ConfigError(f"--http: its process cannot be started ({error.strerror})", "leave it out") from None


def _say_end(process: subprocess.Popen[bytes], is_wanted: threading.Event) -> None:
    code = process.wait()
    if is_wanted.is_set():
        logger.warning("the page has ended (%d); the job continues", code)


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
