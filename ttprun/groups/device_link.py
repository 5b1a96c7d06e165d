"""nccl and hccl: tensors on a device, whose works' `wait` returns before the operation has completed there.

Such a `wait` only orders the device's streams, so whatever the script computes next is computed from an operation that
may still fail. Our works block until the operation has completed, as gloo's do: a failed one never feeds a step. That
costs the CPU its lead over the device at each wait. Completion is asked for again and again, since an operation whose
peer has died does not end by itself. Begin with `LateLink`.

Tried on a simulated device only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ttprun import torch_versions
from ttprun.device import accelerator
from ttprun.device.device_errors import DeviceErrors, DeviceFault
from ttprun.groups.connection import Communicators, ExchangeStore, GroupMember, Link, leak
from ttprun.groups.operations import BATCH, POINT_TO_POINT, Completed, tensors_in
from ttprun.introspect import fail_open

ABORTED = "the communicator was aborted, as its generation is over"
_NOT_ENDED = "a collective whose peer is lost cannot be ended"
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 200e-6
_to_abort: list[Callable[[], Any]] = []  # communicators of a device that was stopped: not before it is restarted
destroying: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # they run destructors of backends
_SUCCESSES = (0, 1)  # c10d's WorkResult: unknown, success; then a time-out, and an error of the communicator


def make_nccl(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    return LateLink(member, "cuda", _nccl)


def make_hccl(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    return LateLink(member, "npu", _registered("hccl"))


def gives_works() -> bool:
    """See `Transport.gives_works`, of nccl."""
    return torch_versions.gives_works(torch.__version__)


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
        while _to_abort:
            _to_abort.pop()()
        prefix = f"group {member.key}/{device_type}/"
        communicators = Communicators(member, device_type, prefix)
        connects_now = communicators.meet()
        self.generation = member.generation
        self.is_aborted = False
        self._device_type = device_type
        self._device = member.device
        self._communicators = communicators
        self.why_not = ""
        self._store = ExchangeStore(member.exchange, member.generation, prefix)
        self.backend: Any = make(self._store, member)
        self.needs_stop = hasattr(self.backend, "abort_hccl_comm")
        self._running: list[Any] = []  # works of a backend that needs a stop
        # torch sends over the group's communicator where that was made at once, in a batch, and else over a pair's own.
        self._has_pairs = not (member.is_given and hasattr(self.backend, "eager_connect_single_device"))
        self._is_batching = False
        if _abort_of(self.backend) is None:
            self.why_not = f"{_NOT_ENDED} (its backend {type(self.backend).__name__} has no abort())"
        self._group: Any = self.backend
        if not isinstance(self.backend, ProcessGroup):
            self._group = ProcessGroup(member.rank, member.size)  # type: ignore[call-arg]
            kind = ProcessGroup.BackendType.NCCL if device_type == "cuda" else ProcessGroup.BackendType.CUSTOM
            self._group._set_default_backend(kind)
            if member.device is not None and (member.device.type, member.device.index is None) == (device_type, False):
                self._group.bound_device_id = member.device  # a barrier, which has no tensors, uses it
            self._group._register_backend(torch.device(device_type), kind, self.backend)
            self._group._set_group_name(member.name)
        if connects_now:
            try:
                communicators.make(member.device, self, have_met=True)
                communicators.check(member.device)
            except BaseException:
                self.drop()
                raise

    # Communicators.

    @property
    def is_used(self) -> bool:
        """Whether it has a communicator."""
        return self._communicators.is_used

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """Whether an operation with these arguments would not block in C++ for its members to connect."""
        return self.is_aborted or self._communicators.has(self.device_of(args), self._peer_in(args))

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Make the communicator for these arguments, if there is none, see `Communicators.make`.

        Not under the journal's lock.
        """
        if not self.is_ready(args):
            self._communicators.make(self.device_of(args), self, peer=self._peer_in(args))

    def _peer_in(self, args: tuple[Any, ...]) -> int | None:
        """The other rank of a message that goes over a pair's own communicator."""
        is_message = len(args) == 3 and type(args[1]) is int
        return args[1] if is_message and self._has_pairs and not self._is_batching else None

    def device_of(self, args: tuple[Any, ...]) -> torch.device:
        """The device that carries out a collective; a barrier has no tensors."""
        tensors = tensors_in(args)
        if tensors:
            of_tensor: torch.device = tensors[0].device
            return of_tensor
        if self._device_type == "cpu":
            return torch.device("cpu")
        options: Any = args[-1] if args else None
        if indices := getattr(options, "device_ids", None):
            return torch.device(self._device_type, indices[0])
        for device in (getattr(options, "device", None), self._device):
            if device is not None and device.type == self._device_type and device.index is not None:
                return device  # type: ignore[no-any-return]
        return torch.device(self._device_type, accelerator.current_index() or 0)

    def wait_for(self, work: Any) -> None:
        """Wait for the backend's work, and no longer than until the link is aborted. Raises an error of either."""
        self._running.append(work)
        LateWork(self, work).wait()

    # Operations.

    def issue(self, op: str, args: tuple[Any, ...]) -> LateWork:
        """See `Link.issue`. Blocks as `make_ready` does."""
        self._prepare(op, args)
        if op == BATCH:
            return self._late(self._call_together(args), op)
        options: Any = args[-1] if args else None
        if getattr(options, "asyncOp", True):
            return self._late(self._call(op, args), op)
        # NCCL (torch 2.8 and newer) has no work for a synchronous operation, and runs it on the caller's own stream:
        # what is queued behind it would be computed from an operation that was aborted.
        options.asyncOp = True
        try:
            return self._late(self._call(op, args), op)
        finally:
            options.asyncOp = False  # it may be the script's

    def _late(self, work: Any, op: str) -> LateWork:
        if work is None and op not in POINT_TO_POINT and op != BATCH:
            self.why_not = self.why_not or f"{_NOT_ENDED} (its backend returns no work for an asynchronous {op})"
        if self.needs_stop and work is not None:
            self._running = [*(one for one in self._running if not one.is_completed()), work]
        return LateWork(self, work)

    def is_busy(self) -> bool:
        """See `Link.is_busy`; what was left to torch is not known."""
        return not all(work.is_completed() for work in self._running)

    def issue_plainly(self, op: str, args: tuple[Any, ...]) -> Any:
        """As torch does: the backend's own work, or None; nothing is waited for beside it.

        A communicator is made before, as in the other ranks; what fails of that means nothing to torch.
        """
        try:
            self._prepare(op, args)
        except Exception as error:
            fail_open.raise_if_meant(error)
        return self._call_together(args) if op == BATCH else self._call(op, args)

    def _call_together(self, args: tuple[Any, ...]) -> Any:
        """Start messages together; returns their work."""
        device = self.device_of(args)
        self.begin_batch(device)
        try:
            for op, message in args[0]:
                self._call(op, message)
        except BaseException:
            with contextlib.suppress(Exception):
                self.end_batch(device)
            raise
        return self.end_batch(device)

    def _prepare(self, op: str, args: tuple[Any, ...]) -> None:
        if not self.is_aborted and not self._is_batching:
            self.make_ready(args)
            self._communicators.check(self.device_of(args), self._peer_in(args))

    def _call(self, op: str, args: tuple[Any, ...]) -> Any:
        options: Any = args[-1] if args else None
        if op == "barrier":
            # torch's group would make a barrier of a backend that it does not know on the CPU.
            if self._device_type != "cpu" and getattr(options, "device", self) is None:
                options.device = self.device_of(args)
            return self.backend.barrier(*args)
        return getattr(self._group, op)(*args)

    def begin_batch(self, device: torch.device) -> None:
        """Operations from now on are started together, by `end_batch`."""
        self._is_batching = True
        self._group._start_coalescing(device)

    def end_batch(self, device: torch.device) -> Any:
        """Returns the work of all operations since `begin_batch`, or None as the backend does."""
        self._is_batching = False
        return self._group._end_coalescing(device)

    # The end.

    def abort(self) -> None:
        """See `Link.abort`. Its operations may touch tensors until the device is synchronized."""
        self.is_aborted = True
        backend = self.backend
        if backend is None or self._communicators.is_left:  # it would not come back
            return
        if self.needs_stop and self.is_busy():  # nor would this, and it may hold the GIL: see generations.py
            self._communicators.is_left = True
            return
        if (abort := _abort_of(backend)) is not None:
            try:
                abort()
            except RuntimeError as error:
                # A device that is stopped does nothing any more, and takes no orders.
                if DeviceErrors({}).diagnose(error).fault is not DeviceFault.FORCED_STOP:
                    raise
                _to_abort.append(abort)

    def close(self) -> None:
        """See `Link.close`. All members must: the last operations of a communicator are collective."""
        shutdown = getattr(self.backend, "shutdown", None)
        if shutdown is not None and not self.is_aborted and not self._communicators.is_left:
            with contextlib.suppress(RuntimeError):
                shutdown()
        self.drop()

    def drop(self) -> None:
        """Forget the backend, without waiting for its destructor: that joins the backend's threads, which may wait."""
        references = [self.__dict__.pop(name, None) for name in ("backend", "_group")]
        self.backend = self._group = None
        self._running = []
        if self._communicators.is_left or sys.is_finalizing():
            leak(references)
        elif references[0] is not None:
            thread = threading.Thread(target=references.clear, name="ttprun-closing", daemon=True)
            try:
                thread.start()
                destroying.add(thread)
            except RuntimeError:  # Python 3.12 starts no thread at the interpreter's end
                leak(references)

    def __del__(self) -> None:
        if self.__dict__.get("backend") is not None:
            self.drop()

    def abandon(self) -> None:
        """See `Link.abandon`: an aborted communicator holds no tensor."""


def _abort_of(backend: Any) -> Callable[[], Any] | None:
    """What ends a backend's operations; None if nothing does.

    HCCL's answers to a name of its own; what torch's base classes have does nothing.
    """
    hccl = getattr(backend, "abort_hccl_comm", None)
    if hccl is not None:
        return partial(hccl, "its generation is over")
    for name in ("abort", "_abort"):
        abort = getattr(backend, name, None)
        is_own = type(backend) is dist.Backend or getattr(type(backend), name, None) is not getattr(
            ProcessGroup, name, None
        )
        if abort is not None and is_own:
            return abort  # type: ignore[no-any-return]
    return None


class LateWork:
    """A work with the meaning of `Link.issue`'s.

    inner   the backend's work; None: it has none, as nothing was started, as in an empty batch
    """

    def __init__(self, link: LateLink, inner: Any) -> None:
        self._link = link
        self._inner = Completed() if inner is None else inner
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

    def order(self) -> None:
        """Order the caller's stream after the operation, as the backend's own `wait`: the host does not wait."""
        self._inner.wait()

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
        watch(self, promise)
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


class _Completing(Protocol):
    def is_completed(self) -> bool: ...


class _Promise(Protocol):
    def set_result(self, result: None) -> None: ...


_watched: deque[tuple[_Completing, _Promise]] = deque()
_changed = threading.Condition()
_watching: list[threading.Thread] = []


def watch(work: _Completing, promise: _Promise) -> None:
    """Complete a promise when its work does, which raises no error."""
    with _changed:
        _watched.append((work, promise))
        if not _watching:
            _watching.append(threading.Thread(target=_complete_promises, name="ttprun-completions", daemon=True))
            _watching[0].start()
        _changed.notify()


def stop_looking(limit_s: float) -> None:
    """Wait until no operation is watched on the device, `limit_s` at most."""
    with _changed:
        _changed.wait_for(lambda: not _watched, limit_s)


def _complete_promises() -> None:
    pause_s = _FIRST_PAUSE_S
    while True:
        with _changed:
            while not _watched:
                _changed.wait()
                pause_s = _FIRST_PAUSE_S
        if _complete_some():
            pause_s = _FIRST_PAUSE_S
        else:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _complete_some() -> bool:
    """Whether any has completed; while the thread waits for more it holds none of their tensors."""
    completed = [watched for watched in list(_watched) if watched[0].is_completed()]
    for _, promise in completed:
        promise.set_result(None)
    with _changed:
        for watched in completed:
            _watched.remove(watched)
        if not _watched:
            _changed.notify_all()
    return bool(completed)
