"""What the page costs: a step with it and without, its server with many ranks and readers, a recovery under a crowd.

    python scripts/bench/page.py --ranks 4 --repeats 3

Each figure is a ratio of pairs, printed with what it is from one turn without to the next. For steps the page's server
is halted and resumed in turns while one job runs: all that a page costs is done there. The crowd is 1,000 clients that
never finish their requests and come again when they are dropped, one that sends a byte a second, and one that sends
1 GB; it runs at low priority, but on the machine that it disturbs. Begin with main().
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from runs import TTPRUN, BenchmarkError, Run, formatted, headline, machine, positive, spread
from steplog import read_log, wait_for_step

from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RankStatus, RunStatus, write_status
from ttprun.web.companion import serving

LIMIT_S = 300.0
BLOCK_S = 3.0
CROWD = 1000
GIGABYTE = 1 << 30
ENDLESS = 1_000_000  # steps
WARM_UP = 500  # steps, by which the standby is ready
STEP = ("--width=256", "--depth=3", "--batch-size=64")
KILL = ("--allow-faults", "--fault", f"kill:rank=1,step={WARM_UP},phase=backward")
PAGE = ("--http", ":0")


def port_of(run: Run) -> int:
    """Where the run shows its page. Raises BenchmarkError if it does not say so in time."""
    give_up_at_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_at_s and run.process.poll() is None:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)/ shows this run", run.output()):
            return int(match[1])
        time.sleep(0.05)
    raise BenchmarkError(f"no page; {run.last_words()}")


def read_events(port: int, is_over: threading.Event) -> None:
    """An open page: takes whatever comes."""
    with contextlib.suppress(OSError, HTTPException):
        connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        while not is_over.is_set() and answer.read1(1 << 20):
            pass


@contextlib.contextmanager
def pages(port: int, number: int) -> Iterator[None]:
    """So many open pages inside `with`."""
    is_over = threading.Event()
    for _ in range(number):
        threading.Thread(target=read_events, args=(port, is_over), daemon=True).start()
    yield
    is_over.set()


def crowd(port: int) -> None:
    """The crowd, until this process is ended."""
    os.nice(19)
    asyncio.run(_crowd(port))


async def _crowd(port: int) -> None:
    async def client(parts: Callable[[], Iterator[bytes]], every_s: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(writer):
                    for part in parts():
                        writer.write(part)
                        await writer.drain()
                        with contextlib.suppress(TimeoutError):
                            if not await asyncio.wait_for(reader.read(1 << 16), every_s):
                                break
            await asyncio.sleep(1.0)

    def unfinished() -> Iterator[bytes]:
        yield b"GET / HTTP/1.1\r\nhost: localhost\r\n"
        while True:
            yield b""

    def byte_by_byte() -> Iterator[bytes]:
        yield from (bytes([byte]) for byte in b"GET /api/status HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 1000)

    def gigabyte() -> Iterator[bytes]:
        yield b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % GIGABYTE
        yield from (bytes(1 << 20) for _ in range(GIGABYTE >> 20))

    slow = [client(unfinished, 5.0) for _ in range(CROWD)]
    await asyncio.gather(*slow, client(byte_by_byte, 1.0), client(gigabyte, 0.001))


@contextlib.contextmanager
def crowded(port: int) -> Iterator[None]:
    """The crowd is there inside `with`."""
    process = get_context("spawn").Process(target=crowd, args=(port,))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def steps(ranks: int, blocks: int, block_s: float) -> dict[str, Any]:
    """One run whose page somebody looks at; its server is halted in every other block. Median steps, block by block."""
    medians: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*STEP, "--step-logs={folder}/logs", f"--steps={ENDLESS}"]
        with Run(TTPRUN, ranks, Path(folder) / "job", PAGE, arguments) as run, pages(port_of(run), 1):
            wait_for_step(run, WARM_UP, 0)
            server = server_of(psutil.Process(run.process.pid))
            for block in range(2 * blocks):
                (server.resume if block % 2 else server.suspend)()
                began_s = time.time()
                time.sleep(block_s)
                ends = [line.at_s for line in read_log(run, 0) if line.word == "step" and line.at_s > began_s]
                medians.append(statistics.median(after - before for before, after in pairwise(ends)))
            server.resume()
    without, with_page = medians[::2], medians[1::2]
    ratio = spread(after / before for before, after in zip(without, with_page, strict=True))
    noise = spread(after / before for before, after in pairwise(without))
    plain = spread(1e3 * seconds for seconds in without)
    print(f"a step of {ranks} ranks: with/without the page {formatted(ratio, 3)};")
    print(f"    without, from block to block {formatted(noise, 3)}; without {formatted(plain, 3)} ms")
    return {"ratio": ratio, "noise": noise, "without_ms": plain}


def server_of(launcher: psutil.Process) -> psutil.Process:
    """The process that serves the page."""
    return next(child for child in launcher.children() if "ttprun.web.server" in child.cmdline())


def recovery(ranks: int, folder: Path, is_crowded: bool) -> float:
    """A run of which a rank is killed: seconds from the loss to the next step."""
    with Run(TTPRUN, ranks, folder, [*PAGE, *KILL], [*STEP, f"--steps={WARM_UP + 300}"]) as run:
        with crowded(port_of(run)) if is_crowded else contextlib.nullcontext():
            run.finish(LIMIT_S)
        (incident,) = json.loads((run.run_dir / "status.json").read_text())["incidents"]
    if incident["outcome"] != "recovered":
        raise BenchmarkError(f"the incident was {incident['outcome']}: {incident['reason']}")
    return float(incident["total_s"])


def recoveries(ranks: int, repeats: int) -> dict[str, Any]:
    """Pairs of a recovery without and with the crowd."""
    pairs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            pairs.append([recovery(ranks, Path(folder) / str(is_crowded), is_crowded) for is_crowded in (False, True)])
    ratio = spread(after / before for before, after in pairs)
    noise = spread(after[0] / before[0] for before, after in pairwise(pairs))
    alone, crowded = (spread(pair[number] for pair in pairs) for number in range(2))
    print(f"a recovery of {ranks} ranks: with/without the crowd {formatted(ratio)};")
    print(f"    without, from run to run {formatted(noise)}; without {formatted(alone)} s, with {formatted(crowded)} s")
    return {"ratio": ratio, "noise": noise, "without_s": alone, "with_s": crowded}


def served(ranks: int, open_pages: int, seconds: float) -> dict[str, float]:
    """A status of so many ranks, written as the agent does: processor shares of the server, and of the writing."""
    with tempfile.TemporaryDirectory() as folder:
        run, started = RunDirectory.create("r1", Path(folder) / "run"), timestamp()

        def write(number: int) -> None:
            shown = tuple(
                RankStatus(rank, rank % 8, 1000 + rank, "running", number, "computing", 0.1, "on", rank // 8, 0.5)
                for rank in range(ranks)
            )
            write_status(
                run.status, RunStatus("r1", "healthy", 0, ranks, os.getpid(), started, timestamp(), ranks=shown)
            )

        write(0)
        with serving(":0", None, run) as url, pages(int(url.rsplit(":")[-1].strip("/")), open_pages):
            server = server_of(psutil.Process())
            time.sleep(3.0)  # its start
            before_s, written_s, began_s, number = sum(server.cpu_times()[:2]), 0.0, time.monotonic(), 1
            while time.monotonic() - began_s < seconds:
                cpu_s = time.thread_time()
                write(number)
                written_s, number = written_s + time.thread_time() - cpu_s, number + 1
                time.sleep(0.5)
            passed_s = time.monotonic() - began_s
            shares = {"server": (sum(server.cpu_times()[:2]) - before_s) / passed_s, "writing": written_s / passed_s}
        run.release()
    print(f"{ranks} ranks, {open_pages} pages: the server takes {100 * shares['server']:.2f} % of a core,")
    print(f"    writing the status {100 * shares['writing']:.2f} %, with or without a page")
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--blocks", type=positive, default=10, help="pairs of blocks of a run, with the page and without"
    )
    parser.add_argument("--simulated", type=positive, default=1024, help="ranks in the status that is served")
    parser.add_argument("--seconds", type=positive, default=30, help="for which it is served")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    where = machine()
    print(headline(where))
    figures = {
        "machine": where,
        "served": served(options.simulated, 10, options.seconds),
        "steps": steps(options.ranks, options.blocks, BLOCK_S),
        "crowd": recoveries(options.ranks, options.repeats),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
