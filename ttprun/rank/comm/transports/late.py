"""nccl and hccl: tensors on a device, whose works' `wait` returns before the operation has completed there.

Such a `wait` only orders the device's streams, so whatever the script computes next is computed from an operation that
may still fail. Our works block until the operation has completed, as gloo's do: a failed one never feeds a step. That
costs the CPU its lead over the device at each wait. Completion is asked for again and again, since an operation whose
peer has died does not end by itself. Begin with `LateLink`.

Tried on a simulated device only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ttprun.rank.comm.connection import CONNECT_LIMIT, ExchangeStore
from ttprun.rank.comm.transports.link import GroupMember, Link

ABORTED = "the communicator was aborted, as its generation is over"
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
_SUCCESSES = (0, 1)  # c10d's WorkResult: unknown, success; then a time-out, and an error of the communicator


def make_nccl(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    return LateLink(member, "cuda", _nccl)


def make_hccl(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    return LateLink(member, "npu", _registered("hccl"))


def _nccl(store: Any, member: GroupMember) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options() if member.options is None else member.options
    options._timeout = member.op_limit
    options.global_ranks_in_group = list(member.ranks)
    options.group_name = member.name
    return dist.ProcessGroupNCCL(store, member.rank, member.size, options)


def _registered(name: str) -> Callable[[Any, GroupMember], Any]:
    """Makes a backend that a package has registered with torch."""

    def make(store: Any, member: GroupMember) -> Any:
        plugin = dist.Backend._plugins[name.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(store, member.rank, member.size, member.op_limit)
        options: Any = torch._C._distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, member.rank, member.size
        options.timeout, options.group_id = member.op_limit, member.name
        options.global_ranks_in_group = list(member.ranks)
        return plugin.creator_fn(options, member.options)

    return make


class LateLink:
    """A communicator of one group in one generation.

    is_aborted   what completes from now on has not succeeded, whatever the backend says: an aborted kernel ends too
    """

    is_late = True

    def __init__(self, member: GroupMember, device_type: str, make: Callable[[Any, GroupMember], Any]) -> None:
        prefix = f"group {member.key}/{device_type}/"
        member.exchange.put(member.generation, f"{prefix}here {member.rank}", b"1")
        # Wait for all members here, before entering C++ code that cannot be interrupted.
        for peer in range(member.size):
            member.exchange.get(member.generation, f"{prefix}here {peer}", CONNECT_LIMIT.total_seconds())
        store = ExchangeStore(member.exchange, member.generation, prefix)
        self.generation = member.generation
        self.is_aborted = False
        self.backend: Any = make(store, member)
        self._store = store
        self._group: Any = self.backend
        if not isinstance(self.backend, ProcessGroup):
            self._group = ProcessGroup(member.rank, member.size)  # type: ignore[call-arg]
            kind = ProcessGroup.BackendType.NCCL if device_type == "cuda" else ProcessGroup.BackendType.CUSTOM
            self._group._set_default_backend(kind)
            if member.device is not None and (member.device.type, member.device.index is None) == (device_type, False):
                self._group.bound_device_id = member.device  # a barrier, which has no tensors, uses it
            self._group._register_backend(torch.device(device_type), kind, self.backend)
            self._group._set_group_name(member.name)
        if member.device is not None and member.device.index is not None and member.device.type == device_type:
            connect = getattr(self.backend, "eager_connect_single_device", None)
            if connect is not None:
                connect(member.device)

    def issue(self, op: str, args: tuple[Any, ...]) -> LateWork:
        """See `Link.issue`."""
        # torch's group would make a barrier of a backend that it does not know on the CPU.
        call = getattr(self.backend if op == "barrier" else self._group, op)
        options: Any = args[-1] if args else None
        if getattr(options, "asyncOp", True):
            return LateWork(self, call(*args))
        # NCCL (torch 2.8 and newer) has no work for a synchronous operation, and runs it on the caller's own stream:
        # what is queued behind it would be computed from an operation that was aborted.
        options.asyncOp = True
        try:
            return LateWork(self, call(*args))
        finally:
            options.asyncOp = False  # it may be the script's

    def begin_batch(self, device: torch.device) -> None:
        """Operations from now on are started together, by `end_batch`."""
        self._group._start_coalescing(device)

    def end_batch(self, device: torch.device) -> LateWork:
        """Returns the work of all operations since `begin_batch`."""
        return LateWork(self, self._group._end_coalescing(device))

    def abort(self) -> None:
        """See `Link.abort`. Its operations may touch tensors until the device is synchronized."""
        self.is_aborted = True
        for name in ("abort", "_abort"):
            if (abort := getattr(self.backend, name, None)) is not None:
                abort()
                return

    def close(self) -> None:
        """See `Link.close`."""
        shutdown = getattr(self.backend, "shutdown", None)
        if shutdown is not None and not self.is_aborted:
            with contextlib.suppress(RuntimeError):
                shutdown()
        self.backend = self._group = None

    def abandon(self) -> None:
        """See `Link.abandon`: an aborted communicator holds no tensor."""


class _NoWork:
    """In the place of a backend's work, where it has none: nothing was started, as in an empty batch."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class LateWork:
    """A work with the meaning of `Link.issue`'s.

    inner   the backend's work; None: it has none
    """

    def __init__(self, link: LateLink, inner: Any) -> None:
        self._link = link
        self._inner = _NoWork() if inner is None else inner
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None

    def wait(self, limit: timedelta | None = None) -> bool:
        """As Work.wait of gloo. The caller's stream is ordered after the operation, too.

        Raises the operation's own error, or RuntimeError after the limit.
        """
        end_s = None if limit is None else time.monotonic() + limit.total_seconds()
        pause_s = _FIRST_PAUSE_S
        while not self.is_completed():
            if end_s is not None and time.monotonic() > end_s:
                raise RuntimeError(f"the operation has not completed within {limit}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._inner.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are there, or the operation has failed. Once it is, that does not change."""
        if not self._is_over:
            with self._lock:
                if not self._is_over:
                    self._is_over = self._look()
        return self._is_over

    def _look(self) -> bool:
        try:
            is_completed = self._inner.is_completed()
            if self._link.is_aborted:  # asked for second: an abort completes operations
                raise RuntimeError(ABORTED)
            if is_completed:
                _raise_error_of(self._inner)
                self._inner.wait()
        except Exception as error:
            self._error = error.with_traceback(None)
            return True
        return bool(is_completed)

    def is_success(self) -> bool:
        """Whether the outputs are there."""
        return self.is_completed() and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes when the work does, on a thread of ours; a backend's own future is as early as its `wait`."""
        promise: torch.futures.Future[Any] = torch.futures.Future()
        future = promise.then(lambda _: self.wait())
        _watch(self, promise)
        return future


def _raise_error_of(work: Any) -> None:
    """Raise the error of a completed work: NCCL's and HCCL's `wait` do not."""
    if type(work) is not Work or not _may_have_failed(work):
        return
    try:
        error = work.exception()
    except TypeError:  # torch before 2.12 cannot give it to Python
        raise RuntimeError("NCCL communicator has failed: torch does not say why") from None
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(str(error))


def _may_have_failed(work: Any) -> bool:
    """False if the backend says that a completed operation has not failed; `exception` prints a warning."""
    try:
        result = work.get_future_result()
    except (AttributeError, RuntimeError):  # before torch 2.7; HCCL has none
        return True
    return bool(result.done()) and result.value() not in _SUCCESSES


_watched: deque[tuple[LateWork, torch.futures.Future[Any]]] = deque()
_changed = threading.Condition()
_watching: list[threading.Thread] = []


def _watch(work: LateWork, promise: torch.futures.Future[Any]) -> None:
    """Complete a promise when its work does."""
    with _changed:
        _watched.append((work, promise))
        if not _watching:
            _watching.append(threading.Thread(target=_complete_promises, name="ttprun-completions", daemon=True))
            _watching[0].start()
        _changed.notify()


def _complete_promises() -> None:
    pause_s = _FIRST_PAUSE_S
    while True:
        with _changed:
            while not _watched:
                _changed.wait()
                pause_s = _FIRST_PAUSE_S
            found = list(_watched)
        completed = [one for one in found if one[0].is_completed()]
        for one in completed:
            _watched.remove(one)
            one[1].set_result(None)
        if completed:
            pause_s = _FIRST_PAUSE_S
            continue
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
