"""A network between nodes is made bad as it is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
