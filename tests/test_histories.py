"""Histories on a bad network: how a network is made bad, and that a wrong end is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import histories
from tests.e2e.harness import Run
from tests.histories import History, Spell, Told, judge
from tests.network import CUT, Link, Network
from tests.nodes import why_none

TALK = """
import socket, sys, time
sock = socket.create_connection(('10.77.0.2', 5000), timeout=5)
for _ in range(int(sys.argv[1])):
    began = time.monotonic()
    sock.sendall(b'x')
    sock.recv(1)
    print(time.monotonic() - began)
"""
LISTEN = """
import socket
with socket.create_server(('0.0.0.0', 5000)) as server:
    print('listens', flush=True)
    sock, _ = server.accept()
    while data := sock.recv(1 << 16):
        sock.sendall(data)
"""


def talk(network: Network, times: int = 1) -> list[float]:
    """Round trips between two nodes, in seconds; [] if they do not reach each other."""
    with subprocess.Popen([*network.inside(1), sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        words = [*network.inside(0), sys.executable, "-c", TALK, str(times)]
        said = subprocess.run(words, capture_output=True, text=True)
        server.kill()
    return [float(line) for line in said.stdout.split()]


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_a_network_delays_and_cuts_as_it_is_told() -> None:
    slow = Link(delay_s=0.1)

    with Network(2) as network:
        network.set_links({(0, 1): slow, (1, 0): slow})
        delayed = talk(network)
        network.set_links({(0, 1): CUT})
        cut = talk(network)
        dropped = network.dropped
        network.set_links({})
        well = talk(network)

    assert min(delayed) >= 0.2
    assert cut == []
    assert dropped > 0
    assert min(well) < 0.1


def lines(rank: int, first: int, last: int, at_s: float, loss: str = "") -> list[str]:
    return [f"[rank {rank}] step {n} loss {loss or n / 7} at {at_s + n:.3f}" for n in range(first, last)]


def start(folder: Path, code: int, events: list[dict[str, Any]], printed: list[str], output: str = "") -> Any:
    log = folder / "logs" / "x" / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(printed) + "\n")
    run = Run(histories.SCRIPT, folder, code, {}, {}, {}, events, None, output)
    return SimpleNamespace(launch=SimpleNamespace(folder=folder), run=run, is_killed=False)


REFERENCE = Run(histories.SCRIPT, Path(), 0, {n: lines(n, 0, 9, 0.0) for n in (0, 1)}, {}, {}, [], "weights")
HISTORY = History(0, 0, "2", True, 3, (Spell("cut", "halves", ((0, 1), (1, 0)), 0.0, 20.0),))
GIVEN_UP = {"event": "run_ended", "reason": "node 1 reaches 1 of 2 agents"}


def problems(folder: Path, *starts: list[Any]) -> list[str]:
    told = Told(HISTORY)
    judge(told, starts, folder, REFERENCE)
    return told.problems


def test_an_end_that_the_table_has_is_no_problem_and_a_wrong_one_is_seen(tmp_path: Path) -> None:
    said = f"ttprun: the job has ended: {GIVEN_UP['reason']}"
    ended = start(tmp_path / "0-0", 143, [GIVEN_UP], lines(0, 0, 5, 10.0), said)
    other = start(tmp_path / "1-0", 143, [GIVEN_UP], lines(1, 0, 5, 10.0))
    silent = start(tmp_path / "2-0", 143, [GIVEN_UP], [])
    wrong = start(tmp_path / "3-0", 1, [GIVEN_UP], lines(1, 0, 2, 20.0, loss="0.5"))

    found = "; ".join(problems(tmp_path, [silent], [wrong]))

    assert problems(tmp_path, [ended], [other]) == []
    assert "exit codes ['1'] are in no row of the table" in found
    assert "rank 1 step 0, rank 1 step 1 came to another loss" in found
    assert "2-0 ended with 143, and nobody says why" in found


def test_two_processes_of_a_rank_and_two_leaders_at_a_time_are_seen(tmp_path: Path) -> None:
    def event(at_s: float, name: str, **fields: Any) -> dict[str, Any]:
        return {"event": name, "at_s": at_s, "generation": 1, **fields}

    late = [event(1.0, "rank_started"), event(9.0, "phase_changed", after="RUNNING")]
    first = start(tmp_path / "0-0", 0, late, lines(0, 0, 9, 10.0))
    second = start(tmp_path / "1-0", 0, [event(2.0, "rank_started"), event(8.0, "leads")], lines(0, 4, 9, 10.5))

    found = "; ".join(problems(tmp_path, [first], [second]))

    assert "rank 0 took steps in 0-0 and in 1-0 at a time" in found
    assert "1-0 leads, and 0-0 orders" in found
