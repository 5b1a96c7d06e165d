"""The process that serves the page: `python -m ttprun.web.server RUN_DIR LISTENER [TOKEN_FILE | --probes-only]`.

It ends with its standard input, a pipe from the launcher, and with the launcher in any case (PR_SET_PDEATHSIG). Signals
that end the job come to all of its processes under Slurm; this one shows how the job is saved, so they do not end it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from ttprun.observe.run_directory import RunDirectory
from ttprun.web import readers
from ttprun.web.app import build
from ttprun.web.companion import PROBES_ONLY
from ttprun.web.feed import Feed

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
        http=readers.LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=readers.HEADER_BYTES,
        timeout_graceful_shutdown=_END_LIMIT_S,
    )
    server = Server(config)

    def end() -> None:
        if not os.read(0, 1):
            asyncio.get_running_loop().remove_reader(0)
            feed.end()
            server.should_exit = True

    asyncio.get_running_loop().add_reader(0, end)
    beside = [asyncio.create_task(feed.follow()), asyncio.create_task(readers.watch())]
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
