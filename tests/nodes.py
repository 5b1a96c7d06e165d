"""Nodes for tests: network namespaces of this machine, joined by a bridge, each with an address of its own.

A launcher is started in a namespace as a user starts it on a machine. Making namespaces needs root and the `ip` and
`nsenter` programs; `why_none()` says why there are none. Begin with `Nodes`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from itertools import count

INTERFACE = "eth0"
_numbers = count()
# It waits until this process closes the pipe, however it ends, and then removes everything.
_CLEAN_UP = """cat >/dev/null
for name in "$@"; do
    for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid"; done
    ip netns del "$name" 2>/dev/null
done"""


def why_none() -> str:
    """Why this machine gives us no nodes, in one line; "" if it does."""
    missing = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"NOT TESTED: several nodes ({' and '.join(missing)} not found)"
    if os.geteuid() != 0:
        return "NOT TESTED: several nodes (network namespaces need root)"
    name = f"ttprun-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"NOT TESTED: several nodes (ip netns add: {tried.stderr.strip()})" if tried.returncode else ""


class Nodes:
    """So many nodes that reach each other; removed with all of their processes at the end, also if we are killed.

    names      of the namespaces
    addresses  of the nodes
    """

    def __init__(self, size: int) -> None:
        base = f"ttprun-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{base}-{number}" for number in range(size)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(size)]
        self._switch = f"{base}-s"

    def __enter__(self) -> Nodes:
        self._guard = subprocess.Popen(
            ["sh", "-c", _CLEAN_UP, "sh", *self.names, self._switch], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge0", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ["peer", "name", f"port{number}", "netns", self._switch]
            ip("-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge0", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")

    def __exit__(self, *_: object) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)

    def inside(self, number: int) -> list[str]:
        """What a command is preceded by to run on a node. Its own pid is that of the command."""
        return ["nsenter", f"--net=/run/netns/{self.names[number]}", "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]

    def rendezvous(self, number: int, size: str = "", host: int = 0) -> list[str]:
        """The options with which the launcher of a node finds the others.

        size   --nnodes; "": all of them
        host   the node that has the store

        Host names do not tell namespaces apart, so c10d must know who is the host.
        """
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[host]}:29400", "--rdzv-id", "nodes"]
        host = ["--rdzv-conf", f"is_host={int(number == host)}", "--local-addr", self.addresses[number]]
        return ["--nnodes", size or str(len(self.names)), *meet, *host]

    def pids(self, number: int) -> list[int]:
        """Pids of all processes of a node."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, number: int) -> None:
        """A node is lost: SIGKILL to all of its processes at once, and its link goes down."""
        self.cut(number)
        self.end_processes(number)

    def end_processes(self, number: int) -> None:
        """SIGKILL to all processes of a node at once; its kernel lives, and closes their connections."""
        for _ in range(3):  # also what was being started meanwhile
            for pid in self.pids(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def cut(self, number: int) -> None:
        """A node's link goes down; its processes live."""
        ip("-n", self.names[number], "link", "set", INTERFACE, "down")

    def join(self, number: int) -> None:
        """A node's link is up again."""
        ip("-n", self.names[number], "link", "set", INTERFACE, "up")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
