"""gloo's sends and receives, with works as `Link.issue` promises them.

gloo's own works cannot be asked whether they have completed, have no future, and break all connections when the time
limit of a `wait` is over (torch 2.13). So threads wait for them: one for each channel (a peer, a direction, a tag).
The messages of a channel arrive in the order in which they were sent.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

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
