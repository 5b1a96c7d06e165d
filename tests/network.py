"""A bad network for tests: nodes whose every packet passes through a switch of ours, which delays, loses and cuts.

`tc netem` is not in every kernel, so the nodes' interfaces are TAP devices, and a thread of this process forwards the
frames between them. Below TCP nothing is modelled: retransmissions, time-outs and resets are the kernel's own, and all
that crosses nodes is subject to them (rendezvous store, agents, ranks). Begin with `Network.set_links`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, permutations

from tests import nodes
from tests.nodes import Nodes

_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_FRAME_BYTES = 16 << 10
_numbers = count()


@dataclass(frozen=True)
class Link:
    """One direction between two nodes.

    delay_s   of each frame
    loss      share of the frames that are lost, 0 to 1
    is_cut    all are
    """

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


GOOD = Link()
CUT = Link(is_cut=True)


class Network(Nodes):
    """Nodes as in `Nodes`, on a network that can be made bad.

    is_routed   nodes know each other's hardware addresses, as they know their router's: who cannot be reached is
                silent. Else the kernel asks for an address, and soon says that there is no route to its host
    """

    def __init__(self, size: int, seed: int | str = 0, is_routed: bool = True) -> None:
        super().__init__(size)
        self._random = random.Random(seed)
        self._is_routed = is_routed
        self._links: Mapping[tuple[int, int], Link] = {}
        self._due: list[tuple[float, int, int, bytes]] = []  # at, order, to, frame
        self._order = count()
        self._taps: list[int] = []
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self.dropped = 0

    def set_links(self, links: Mapping[tuple[int, int], Link]) -> None:
        """How the network is from now on: (from, to) -> link; what is not named is good."""
        self._links = dict(links)

    def cut(self, number: int) -> None:
        """Nobody reaches a node any more."""
        rest = tuple(other for other in range(len(self.names)) if other != number)
        self.set_links(cut_between(((number,), rest)))

    def join(self, number: int) -> None:
        """All is good again."""
        self.set_links({})

    def _make(self) -> None:
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            nodes.ip("netns", "add", name)
            nodes.ip("-n", name, "link", "set", "lo", "up")
            tap = f"tt{os.getpid() % 100_000}x{next(_numbers)}"
            self._taps.append(_tap(tap))
            nodes.ip("link", "set", tap, "netns", name)
            nodes.ip("-n", name, "link", "set", tap, "name", nodes.INTERFACE, "address", _hardware(number))
            nodes.ip("-n", name, "address", "add", f"{address}/24", "dev", nodes.INTERFACE)
            nodes.ip("-n", name, "link", "set", nodes.INTERFACE, "up", "mtu", "9000")
        for one, other in permutations(range(len(self.names)), 2) if self._is_routed else ():
            known = [self.addresses[other], "lladdr", _hardware(other), "dev", nodes.INTERFACE, "nud", "permanent"]
            nodes.ip("-n", self.names[one], "neigh", "add", *known)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b"x")
        if self._thread.is_alive():
            self._thread.join()
        super().__exit__()
        for descriptor in (*self._taps, self._wake, self._waker):
            os.close(descriptor)

    def _forward(self) -> None:
        """The switch."""
        numbers = {tap: number for number, tap in enumerate(self._taps)}
        with selectors.DefaultSelector() as selector:
            for tap in (*self._taps, self._wake):
                selector.register(tap, selectors.EVENT_READ)
            while True:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                ready = selector.select(wait_s) if wait_s is None or wait_s > 0 else ()
                for key, _ in ready:
                    if key.fd == self._wake:
                        return
                    self._take(numbers[key.fd])
                while self._due and self._due[0][0] <= time.monotonic():
                    _, _, to, frame = heapq.heappop(self._due)
                    self._send(to, frame)

    def _take(self, number: int) -> None:
        """Frames of a node."""
        for _ in range(64):
            try:
                frame = os.read(self._taps[number], _FRAME_BYTES)
            except OSError:  # there are no more, or its link is down
                return
            is_to_all = frame[0] & 1
            for other in range(len(self._taps)):
                if other != number and (is_to_all or frame[5] == other + 1):
                    self._pass(number, other, frame)

    def _pass(self, number: int, other: int, frame: bytes) -> None:
        link = self._links.get((number, other), GOOD)
        if link.is_cut or (link.loss and self._random.random() < link.loss):
            self.dropped += 1
        elif link.delay_s:
            heapq.heappush(self._due, (time.monotonic() + link.delay_s, next(self._order), other, frame))
        else:
            self._send(other, frame)

    def _send(self, number: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # its link is down, or its queue is full
            os.write(self._taps[number], frame)


def cut_between(groups: tuple[tuple[int, ...], ...]) -> dict[tuple[int, int], Link]:
    """Links for nodes that reach those of their own group only."""
    return {
        (one, other): CUT
        for group in groups
        for one in group
        for another in groups
        if another != group
        for other in another
    }


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _IFF_TAP_NO_PI, b""))
    return descriptor


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"
