"""gloo: the CPU's tensors, over TCP, on connections that can be cut at once. Begin with `Connection`.

gloo's own abort() does not wake a rank that waits for a living peer (torch 2.13), so the backend's TCP sockets are shut
down instead: every pending operation then fails within milliseconds. The listener is left alone: shutting it down
aborts the process. Each backend gets a gloo device of its own, hence its own listening port, which identifies its
sockets.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from ttprun.groups.connection import CONNECT_LIMIT, Exchange, ExchangeStore, GroupMember, Link, leak
from ttprun.groups.journal import has_succeeded
from ttprun.introspect.tensor_bytes import size_of

# gloo's sends and receives, with works as `Link.issue` promises them.
#
# gloo's own works cannot be asked whether they have completed, have no future, and break all connections when the
# time limit of a `wait` is over (torch 2.13). So threads wait for them: one for each channel (a peer, a direction, a
# tag). The messages of a channel arrive in the order in which they were sent.

OPERATIONS = frozenset({"send", "recv", "recv_anysource"})


class P2pChannels:
    """The channels of one connection.

    limit    the time-out that the script has asked for
    issued   operations so far
    """

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit
        self.issued = 0
        self._works: dict[tuple[Any, ...], queue.SimpleQueue[P2pWork | None]] = {}  # by operation, peer and tag
        self._threads: list[threading.Thread] = []

    def issue(self, native: ProcessGroup, op: str, args: tuple[Any, ...]) -> P2pWork:
        """Issue a send or a receive; returns its work, for which a thread of its channel waits.

        native   torch's process group (gloo)
        op       one of OPERATIONS
        args     the backend's: ([tensor], peer's rank in the group, tag), without the peer for "recv_anysource"

        Raises the backend's error.
        """
        work = P2pWork(op, getattr(native, op)(*args), self._limit)
        channel = (op, *args[1:])
        if channel not in self._works:
            works = self._works[channel] = queue.SimpleQueue()
            thread = threading.Thread(target=_complete_all, args=(works,), name=f"ttprun-{op}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._works[channel].put(work)
        self.issued += 1
        return work

    def end(self) -> None:
        """End the threads, each after the operations of its channel."""
        for works in self._works.values():
            works.put(None)

    def join(self, limit_s: float) -> bool:
        """After `end`: whether the threads have ended; waits `limit_s` at most.

        One that is left in gloo when the interpreter finalizes aborts the process.
        """
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _complete_all(works: queue.SimpleQueue[P2pWork | None]) -> None:
    while (work := works.get()) is not None:
        work.complete()
        del work  # it need not live until the next one comes


class P2pWork:
    """A work with the meaning of `Link.issue`'s; of its methods only `complete` asks gloo's own.

    inner   gloo's work; dropped when it is over, as it holds the tensor
    limit   of the operation
    """

    def __init__(self, op: str, inner: Any, limit: timedelta) -> None:
        self._op = op
        self._inner = inner
        self._limit = limit
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._source = -1
        self._promises: list[torch.futures.Future[Any]] = []

    def complete(self) -> None:
        """Block until the operation has completed or failed."""
        try:
            self._inner.wait(self._limit)
            if self._op == "recv_anysource":
                self._source = self._inner._source_rank()
        except Exception as error:
            self._error = error.with_traceback(None)
        self._inner = None
        with self._lock:
            self._is_over.set()
            promises, self._promises = self._promises, []
        for promise in promises:
            promise.set_result(None)

    def wait(self, limit: timedelta | None = None) -> bool:
        """Block until the operation is over. Raises its error, or RuntimeError after `limit`: the operation goes on."""
        if not self._is_over.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError(f"the {self._op} has not completed within {limit}")
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has completed or failed."""
        return self._is_over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes, or fails, with the operation."""
        promise: torch.futures.Future[Any] = torch.futures.Future()
        future = promise.then(lambda _: self.wait())
        with self._lock:
            is_over = self._is_over.is_set()
            if not is_over:
                self._promises.append(promise)
        if is_over:
            promise.set_result(None)
        return future

    def _source_rank(self) -> int:
        """The sender of what was received from any; torch's `recv` asks for it."""
        return self._source


# A reduce-scatter over gloo, which has none of its own: an all-reduce, of which each rank keeps its part.
#
# torch (2.13) does the same, but a recovery cannot use the work that it returns: that never reports completion,
# ignores time limits, waits in C++ for as long as the operation lasts, and writes its output again each time it is
# waited for.

REDUCE_SCATTERS = frozenset(
    {"_reduce_scatter_base", "reduce_scatter_single"}
    | {"reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"}
)

_MOST_SPARE = 2
_MOST_SPARE_BYTES = 64 << 20


def is_for(op: str, args: tuple[Any, ...]) -> bool:
    """Whether it is such an operation, on the CPU."""
    return op in REDUCE_SCATTERS and all(tensor.is_cpu for tensor in _as_list(args[1]))


class SpareMemory:
    """Memory in which inputs are reduced, used again by later operations.

    As torch clones each input and frees the clone, the system clears its pages each time: 5 % of the processor time of
    a step with FSDP2. At most _MOST_SPARE buffers of _MOST_SPARE_BYTES are kept, more than FSDP2 uses at once.
    """

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """A tensor of bytes, at least `size` of them."""
        with self._lock:
            at = next((at for at, spare in enumerate(self._spare) if spare.nbytes >= size), None)
            if at is not None:
                return self._spare.pop(at)
        with torch.inference_mode(False):  # or nothing could write to it outside of one
            return torch.empty(size, dtype=torch.uint8)

    def take_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Nothing reads or writes these any more.

        buffers   from `take`
        """
        with self._lock:
            kept = [*self._spare, *(buffer for buffer in buffers if buffer.nbytes <= _MOST_SPARE_BYTES)]
            self._spare = sorted(kept, key=size_of)[-_MOST_SPARE:]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class ReduceScatter:
    """One operation, with the interface of the backend's works.

    native   process group whose backend is gloo
    rank     of this process in it
    size     of the group
    args     output, input, and torch's options; of a coalesced one, lists of outputs and inputs
    memory   of operations over the same connection
    """

    def __init__(self, native: Any, rank: int, size: int, args: tuple[Any, ...], memory: SpareMemory) -> None:
        outputs, given, *others = args
        options = dist.AllreduceOptions()
        if others:
            options.reduceOp, options.timeout = others[0].reduceOp, others[0].timeout
        inputs = _as_list(given)
        self._memory = memory
        self._buffers = [memory.take(tensor.nbytes) for tensor in inputs]
        reduced = [
            buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            for buffer, tensor in zip(self._buffers, inputs, strict=True)
        ]
        self._outputs = _as_list(outputs)
        self._parts = [tensor.chunk(size)[rank] for tensor in reduced]
        self._is_kept = False
        self._lock = threading.Lock()
        self._inner = [native.allreduce([tensor], options) for tensor in reduced]

    def wait(self, *limit: timedelta) -> bool:
        """Block until the outputs are written, `limit` for each at most. Raises what the backend raises."""
        for work in self._inner:
            work.wait(*limit)
        self._keep_parts()
        return True

    def is_completed(self) -> bool:
        """Whether the outputs are written, or the operation has failed."""
        if not all(work.is_completed() for work in self._inner):
            return False
        if self.is_success():
            self._keep_parts()
        return True

    def is_success(self) -> bool:
        return all(map(has_succeeded, self._inner))

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs."""

        def completed(finished: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for inner in finished.value():
                inner.value()
            self._keep_parts()
            return self._outputs

        together = torch.futures.collect_all([work.get_future() for work in self._inner])
        future: torch.futures.Future[Any] = together.then(completed)
        return future

    def _keep_parts(self) -> None:
        with self._lock, torch.no_grad():
            if not self._is_kept:
                for output, part in zip(self._outputs, self._parts, strict=True):
                    output.copy_(part.reshape(output.shape))
                self._parts = []
                self._memory.take_back(self._buffers)
                self._is_kept = True


_MESSAGES_LIMIT_S = 0.5  # for the other end of a message, when a connection is closed


class Connection:
    """A connected gloo backend: the `Link` of gloo.

    native   torch's process group over it, which picks the operation by a tensor's device

    Constructing it blocks until every member has connected, at most CONNECT_LIMIT; raises GenerationOverError if the
    generation ends first.
    """

    is_late = False
    is_used = True
    why_not = ""
    is_aborted = needs_stop = False
    _making = threading.Lock()

    def __init__(
        self, exchange: Exchange, generation: int, name: str, rank: int, size: int, op_limit: timedelta
    ) -> None:
        prefix = f"group {name}/"
        opened_before = _fds(*_GLOOS)
        with Connection._making:
            before = _listening_ports()
            device = dist.ProcessGroupGloo.create_device(hostname=exchange.address)
            ports = _listening_ports() - before
        exchange.put(generation, f"{prefix}port {rank}", ",".join(map(str, ports)).encode())
        self._ports = set(ports)
        self._inodes: set[int] = set()
        self._listeners = dict.fromkeys(ports, rank)
        # Wait for all members here, before entering C++ code that cannot be interrupted.
        for peer in range(size):
            listed = exchange.get(generation, f"{prefix}port {peer}", CONNECT_LIMIT.total_seconds())
            theirs = {int(port) for port in listed.split(b",") if port}
            self._ports |= theirs
            self._listeners |= dict.fromkeys(theirs, peer)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=20)
        self.backend: Any = dist.ProcessGroupGloo(ExchangeStore(exchange, generation, prefix), rank, size, options)
        self.backend._set_default_timeout(op_limit)
        self.native: Any = ProcessGroup(rank, size)  # type: ignore[call-arg]
        self.native._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.native._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self.backend)
        self._spare_memory = SpareMemory()
        self._p2p_channels = P2pChannels(op_limit)
        self._rank, self._size = rank, size
        self.generation = generation
        # A broken socket has lost its addresses, but must be found to be cut: gloo may wait on it for ever.
        self._inodes = {os.fstat(sock.fileno()).st_ino for sock in self.sockets()}
        for fd in _fds(*_GLOOS) - opened_before:  # the script's child processes must not hold them open
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)

    def serve(self, device_type: str) -> None:
        """Carry tensors on another device, too."""
        self.native._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, self.backend)

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation; returns its work."""
        if is_for(op, args):
            return ReduceScatter(self.native, self._rank, self._size, args, self._spare_memory)
        if op in OPERATIONS:
            return self._p2p_channels.issue(self.native, op, args)
        return getattr(self.native, op)(*args)

    issue_plainly = issue

    def abort(self) -> None:
        """Shut down every socket of this backend; pending and later operations fail at once."""
        for sock in self.sockets():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Destroy the backend with its threads; blocks until its operations have ended.

        Messages that are still under way after _MESSAGES_LIMIT_S are cut off.
        """
        self._p2p_channels.end()
        if not self._p2p_channels.join(_MESSAGES_LIMIT_S):
            self.abort()
            self._p2p_channels.join(_MESSAGES_LIMIT_S)
        self.backend = self.native = None

    def __del__(self) -> None:
        """If the last reference is dropped on one of gloo's threads, destroy the backend on a Python thread.

        gloo's callbacks hold a reference to the group, which the script may have destroyed meanwhile. The backend's
        destructor joins its threads: on one of them that aborts the process.
        """
        if (channels := self.__dict__.get("_p2p_channels")) is not None:
            channels.end()
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return
        references = [self.__dict__.pop(name, None) for name in ("backend", "native")]  # which the other thread drops
        try:
            threading.Thread(target=references.clear, name="ttprun-closing", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread at the interpreter's end
            leak(references)

    def is_busy(self) -> bool:
        """Not asked: its abort ends all operations."""
        return False

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """All members are connected from the start."""
        return True

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Nothing is left to do."""

    def drop(self) -> None:
        """Whoever holds the last reference destroys it."""

    def abandon(self) -> None:
        """Leak the backend: its destructor would wait for an operation that does not end.

        That happens now and then (gloo, torch 2.13) if the connection is cut while messages are in flight. As all
        sockets are closed, the operation touches no tensor any more; it ends with its time-out.
        """
        leak(self.backend)

    def sockets(self) -> Iterator[socket.socket]:
        """Duplicates of this backend's connected sockets; each is closed when the next one is yielded."""
        for fd in _fds("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or _is_listening(sock):
                    continue
                is_known = os.fstat(sock.fileno()).st_ino in self._inodes
                if is_known or sock.getsockname()[1] in self._ports or sock.getpeername()[1] in self._ports:
                    yield sock

    def listener_of(self, port: int) -> int | None:
        """The rank in the group of the member that listens on a port; None if none does."""
        return self._listeners.get(port)


def listen(address: str) -> socket.socket:
    """A listener of our own, which is not taken for one of gloo's that is being made on another thread."""
    with Connection._making:
        return socket.create_server((address, 0), backlog=2)


_GLOOS = "socket:", "pipe:", "anon_inode:[eventpoll]"  # which it opens without close-on-exec (torch 2.13)


def _fds(*kinds: str) -> set[int]:
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(kinds):
                fds.add(int(name))
    return fds


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening_ports() -> set[int]:
    ports = set()
    for fd in _fds("socket:"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and _is_listening(sock):
                ports.add(sock.getsockname()[1])
    return ports


def make_gloo(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    connection = Connection(member.exchange, member.generation, member.key, member.rank, member.size, member.op_limit)
    connection.native._set_group_name(member.name)
    return connection
