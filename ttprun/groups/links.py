"""A process group's connections: by type of device, in one generation after another.

How they are made, by the name of the backend: TRANSPORTS. A recovery cuts the links of all groups, drops them, and
makes those of the new generation, whose keys are that generation's. What the transports differ in ends there: the works
that `Link.issue` returns mean the same for all. What the group's operations are, and what is noted of them, is
`process_group.py`'s. Begin with `Links.connect`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ttprun.device.device_errors import in_one_line
from ttprun.device.interface import DeviceFailedError
from ttprun.groups.connection import CONNECT_LIMIT, GenerationOverError, GroupMember, Link, Transport
from ttprun.groups.device_link import gives_works, make_hccl, make_nccl
from ttprun.groups.gloo import Connection, make_gloo
from ttprun.groups.journal import EndedError, Journal
from ttprun.groups.operations import tensors_in
from ttprun.introspect import stages
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.reason import Reason

TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport("gloo", frozenset({"cpu"}), make_gloo),
        Transport("nccl", frozenset({"cuda"}), make_nccl, is_late=True, gives_works=gives_works),
        Transport("hccl", frozenset({"npu"}), make_hccl, is_late=True),
    )
}


ABORT_LIMIT_S = 20.0  # half a second was seen on a GPU
CLOSE_LIMIT_S = 10.0
_LOOK_AGAIN_S = 0.2


class Links:
    """The connections of one group.

    backends       type of device -> name of the backend for its tensors
    member         this process's place in the group, in the generation of the links; -1 before the first
    is_joined      all members have connected once; until then the main thread connects
    is_late        a backend's works are waited for on a device
    needs_stop     a backend of the newest connections ends no running operation by itself, see `Link.needs_stop`
    """

    def __init__(self, session: Rank, member: GroupMember, backends: Mapping[str, str]) -> None:
        self.backends = backends
        self.member = member
        self.is_joined = False
        self._session = session
        self._by_type: dict[str, Link] = {}  # by type of device; {} while there is no connection
        self._connecting = threading.Lock()
        self.is_late = any(TRANSPORTS[name].is_late for name in backends.values())
        self.needs_stop = False
        self._was_used = False  # a communicator of an older generation was

    @property
    def all(self) -> list[Link]:
        """The current connections, one for each backend; [] while there are none."""
        return list({id(link): link for link in self._by_type.values()}.values())

    @property
    def by_gloo(self) -> Connection | None:
        """The current connection by gloo; None while there is none."""
        return next((link for link in self.all if isinstance(link, Connection)), None)

    def of(self, device_type: str) -> Link | None:
        """The current connection that carries a device's tensors."""
        return self._by_type.get(device_type)

    # Making them.

    def connect(self) -> None:
        """Connect in the session's generation, or a later one, and block until all members have."""
        while True:
            generation = self._session.generation
            try:
                self.connect_in(generation)
                self.is_joined = True
                return
            except (GenerationOverError, RuntimeError):
                framework = self._session.framework
                if framework is not None and not framework.may_connect_again():
                    raise
                if not self._wait_for_generation_after(generation):
                    raise

    def _wait_for_generation_after(self, tried: int) -> bool:
        session = self._session
        with session.changed:
            return (
                session.changed.wait_for(
                    lambda: (
                        bool(session.unprotected) or (session.generation > tried and not session[Journal].is_frozen)
                    ),
                    timeout=CONNECT_LIMIT.total_seconds(),
                )
                and not session.unprotected
            )

    def connect_in(self, generation: int) -> None:
        """Connect in one generation. Raises GenerationOverError, RuntimeError or TimeoutError.

        The main thread (the script makes the group) and the recovery thread may both call this; it is done once.
        """
        with self._connecting:
            if not self.are_of(generation):
                self._connect_anew(generation)

    def are_of(self, generation: int) -> bool:
        """Whether the group is connected in that generation."""
        return bool(self._by_type) and self.member.generation == generation

    def _connect_anew(self, generation: int) -> None:
        given = self.member.device if self.member.is_given else None
        device = given or self._session.observers.device_in_use()
        # A survivor makes the communicators anew that it had. A replacement had none, and follows the others.
        connects_now = given is not None or self._was_used or not self._session.mode.is_live
        member = dataclasses.replace(self.member, generation=generation, device=device, connects_now=connects_now)
        made = {name: TRANSPORTS[name].make(member) for name in dict.fromkeys(self.backends.values())}
        for listener in stages.listeners if isinstance(made.get("gloo"), Connection) else ():
            listener.connected(member.exchange, made["gloo"], member.name, member.rank)
        with self._session[Journal].lock:
            self._by_type = {device_type: made[name] for device_type, name in self.backends.items()}
            self.member = member
            self.needs_stop = any(link.needs_stop for link in made.values())
        self.check_repairable()

    def rename(self, name: str) -> None:
        """Torch has named the group."""
        self.member = dataclasses.replace(self.member, name=name)

    # Ending them.

    def cut(self) -> None:
        """Break the connections: pending operations fail at once."""
        cut_all([self])

    def forget(self) -> None:
        """Drop broken connections; their operations have all failed or completed."""
        for link in self._taken():
            link.drop()

    def close(self) -> None:
        """Drop the connections of a group that the script destroys, in all its members.

        Blocks for CLOSE_LIMIT_S at most: the members of a communicator end it together.
        """
        late = [link for link in self._taken() if link.is_late]
        run_together([link.close for link in late], CLOSE_LIMIT_S)

    def _taken(self) -> list[Link]:
        links, self._by_type = self.all, {}
        self._was_used = self._was_used or any(link.is_late and link.is_used for link in links)
        return links

    def abandon(self) -> None:
        """Leave the backends alone, as an operation on a broken connection does not end."""
        for link in self.all:
            link.abandon()

    # Using them.

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective with these arguments can be issued without waiting for the other members to connect."""
        return not self.is_late or not self._by_type or self.that_carries(args).is_ready(args)

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Wait until it can, or the journal is frozen: then the recovery's thread issues it.

        Not under the journal's lock: a recovery needs that. Raises EndedError if this process is to end.
        """
        journal = self._session[Journal]
        while not journal.is_frozen and not self.is_ready(args):
            generation = self.member.generation
            try:
                self.that_carries(args).make_ready(args)
            except GenerationOverError:
                self._wait_for_freeze(generation)

    def _wait_for_freeze(self, generation: int) -> None:
        """The agent has ended this generation: wait until the recovery's thread knows."""
        journal = self._session[Journal]
        with journal.changed:
            while not journal.is_frozen and self.member.generation == generation:
                if journal.is_ended:
                    raise EndedError
                if journal.admit is not None:
                    journal.admit()
                journal.changed.wait(_LOOK_AGAIN_S)

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation on the current connection; returns the backend's work. Raises the backend's error."""
        return self.that_carries(args).issue(op, args)

    def issue_plainly(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation as torch does; returns what the backend returns. Raises the backend's error."""
        return self.that_carries(args).issue_plainly(op, args)

    def check_repairable(self) -> None:
        """Give up protection if a backend turns out to lack what a recovery needs."""
        if not self.is_late:
            return
        why_not = next((link.why_not for link in self.all if link.why_not), "")
        if why_not:
            self._session.give_up_protection(Reason("device", why_not))

    def gives_work(self, args: tuple[Any, ...]) -> bool:
        """Whether torch's own group would return a work for a collective with these arguments, and not None."""
        if not self.is_late or getattr(args[-1] if args else None, "asyncOp", True):
            return True
        tensors = tensors_in(args)
        kinds = [kind for kind in self.backends if kind != "cpu"] or ["cpu"]
        name = self.backends.get(tensors[0].device.type if tensors else kinds[0])
        return name not in TRANSPORTS or TRANSPORTS[name].gives_works()

    def that_carries(self, args: tuple[Any, ...]) -> Link:
        """The connection for an operation's arguments: that of its tensors' device; a barrier goes over a device.

        Raises RuntimeError if there is none, as torch does.
        """
        links = self._by_type
        if not links:
            raise RuntimeError(f"process group {self.member.name!r} has been destroyed")
        if len(links) == 1 and "cpu" in links:
            return links["cpu"]
        tensors = tensors_in(args)
        device_type = tensors[0].device.type if tensors else next((name for name in links if name != "cpu"), "cpu")
        if device_type not in links:
            raise RuntimeError(f"No backend type associated with device type {device_type}")
        return links[device_type]

    def device_fault_of(self, error: BaseException | None) -> str:
        """The device fault that an operation's error means; "" if it is the connection's, or unknown."""
        return self._session.diagnose(error).name if self.is_late and error is not None else ""


def cut_all(of_groups: Iterable[Links]) -> None:
    """Break the connections of several groups: pending operations fail at once.

    Those of a device are aborted at the same time: an abort of NCCL's may wait until all that runs on the device has
    ended, and so for the operation of another group, whose peer is lost. Raises DeviceFailedError if an abort fails, or
    has not returned within ABORT_LIMIT_S.
    """
    abort_all([link for links in of_groups for link in links.all])


def abort_all(links: Sequence[Link]) -> None:
    """See `cut_all`."""
    for link in links:
        if not link.is_late:
            link.abort()
    late = [partial(_abort_late, link) for link in links if link.is_late]
    failed, n_left = run_together(late, ABORT_LIMIT_S)
    if failed:
        raise DeviceFailedError(f"a communicator cannot be aborted ({in_one_line(failed[0])})") from failed[0]
    if n_left:
        raise DeviceFailedError(
            f"the abort of {n_left} communicators has not returned within {ABORT_LIMIT_S:.0f} s; something else may "
            "run on the device that no abort ends: a kernel of the script's, or NVSHMEM's"
        )


def _abort_late(link: Link) -> None:
    link.abort()
    stages.reached("abort")


def run_together(calls: Sequence[Callable[[], None]], limit_s: float) -> tuple[list[Exception], int]:
    """Call each on a thread of its own, and wait `limit_s` at most: (what they have raised, how many are left behind).

    For calls into C++ that may never return.
    """
    failed: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), name="ttprun-ending", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    return failed, sum(thread.is_alive() for thread in threads)
