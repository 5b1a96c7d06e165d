"""The communicators of a backend for devices: one for each device of this process, in one generation.

NCCL and HCCL make one within the first collective on a device: they block in C++, without a limit and deaf to an abort,
until all members have come. If a member is lost meanwhile, that thread is lost, too. So they are made here, on a thread
that may be left behind, once all members have said that they are about to. Whoever waits for it waits in Python, and no
longer than the generation lasts. Begin with `make`.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ttprun.groups.connection import CONNECT_LIMIT, GroupMember
from ttprun.introspect import fault_points

_LATER = b"-"  # what a member says that makes its communicator within its first collective


class Connecting(Protocol):
    """The link whose communicators are made: `LateLink`.

    is_aborted   its generation is over
    """

    backend: Any
    is_aborted: bool

    def abort(self) -> None: ...
    def wait_for(self, work: Any) -> None: ...


class Communicators:
    """Those of one group in one generation.

    is_left   a thread is in C++ to make one, maybe for ever: nobody else may call the backend, or destroy it
    """

    def __init__(self, member: GroupMember, device_type: str, prefix: str) -> None:
        self._member = member
        self._prefix = prefix
        self._made: dict[
            int, Exception | None
        ] = {}  # index of a device -> why there is no communicator, None: there is
        self._making = threading.Lock()
        self.is_left = False
        device = member.device
        knows = device is not None and device.type == device_type and device.index is not None
        self._said = str(device).encode() if knows and member.connects_now else _LATER

    def meet(self) -> bool:
        """Wait until all members are here; returns whether all are about to make a communicator, on `member.device`.

        Blocks for CONNECT_LIMIT at most. Raises GenerationOverError or TimeoutError.
        """
        return _LATER not in self._tell("here", self._said)

    @property
    def is_used(self) -> bool:
        """Whether there is one."""
        return bool(self._made)

    def has(self, device: torch.device) -> bool:
        """Whether an operation on this device does not block: its communicator is there, or could not be made."""
        return device.type == "cpu" or device.index in self._made

    def check(self, device: torch.device) -> None:
        """Raise the error with which a communicator could not be made."""
        error = self._made.get(device.index)
        if error is not None:
            raise error.with_traceback(None)

    def make(self, device: torch.device, link: Connecting, have_met: bool = False) -> None:
        """Make the communicator on a device, if there is none; an error is kept for `check`.

        have_met   all members are known to be about to make it

        Blocks until all members have made it, and no longer than a collective may last. Raises GenerationOverError if
        the generation ends first.
        """
        with self._making:
            if self.has(device):
                return
            number = len(self._made)
            try:
                if have_met and not self._member.is_given:
                    fault_points.reached("connect")
                elif not have_met:  # a member may come late to its first collective
                    self._tell(f"connects {number}", b"1", max(CONNECT_LIMIT, self._member.op_limit))
                self._make_on_thread(number, device, link)
            except TimeoutError as error:
                self._made[device.index] = RuntimeError(f"a communicator could not be made: {error}")

    def _tell(self, what: str, value: bytes, limit: timedelta = CONNECT_LIMIT) -> list[bytes]:
        """Say something to all members, and wait until all have said theirs."""
        member = self._member
        member.exchange.put(member.generation, f"{self._prefix}{what} {member.rank}", value)
        limit_s = limit.total_seconds()
        keys = [f"{self._prefix}{what} {peer}" for peer in range(member.size)]
        return [member.exchange.get(member.generation, key, limit_s) for key in keys]

    def _make_on_thread(self, number: int, device: torch.device, link: Connecting) -> None:
        exchange, generation = self._member.exchange, self._member.generation
        ended = f"{self._prefix}has connected {number}"
        failed: list[Exception] = []

        def connect() -> None:
            try:
                self._connect(device, link)
            except Exception as error:
                failed.append(error.with_traceback(None))
            self.is_left = False
            exchange.deliver(generation, ended, b"1")  # for this process alone

        self.is_left = True
        threading.Thread(target=connect, name="ttprun-connecting", daemon=True).start()
        exchange.get(generation, ended, max(CONNECT_LIMIT, self._member.op_limit).total_seconds())
        self._made[device.index] = failed[0] if failed else None

    def _connect(self, device: torch.device, link: Connecting) -> None:
        """Have the backend make its communicator, as torch does: at once, if the script has given the device, and else
        within the first collective."""
        backend, module = link.backend, getattr(torch, device.type)
        module.set_device(device.index)
        connect = getattr(backend, "eager_connect_single_device", None) if self._member.is_given else None
        if connect is not None:
            connect(device)
            work = None
        else:
            options: Any = dist.AllreduceOptions()
            options.asyncOp = True
            with module.stream(module.Stream(device)):  # not behind what the script has still running
                work = backend.allreduce([torch.zeros(1, device=device)], options)
        self.is_left = False
        if link.is_aborted:  # which this thread has missed, as it could not be reached
            link.abort()
        elif work is not None:
            link.wait_for(work)


def leak(value: Any) -> None:
    """Never destroy it: its destructor would wait for a thread that does not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
