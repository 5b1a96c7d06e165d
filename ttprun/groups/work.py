"""What an operation returns to the script; and works of operations that the backend never had, or has refused."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections import deque
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ttprun import torch_versions
from ttprun.groups.journal import EndedError, Journal, has_succeeded
from ttprun.groups.operations import Entry
from ttprun.groups.results import Results
from ttprun.introspect import fail_open, signal_handlers
from ttprun.introspect.current_rank import current
from ttprun.introspect.signal_handlers import waiting
from ttprun.protocol.board import Phase


class ManagedWork(Work):
    """What a collective returns to the script, or to DDP's reducer."""

    def __init__(self, journal: Journal, entry: Entry) -> None:
        super().__init__()
        self._journal = journal
        self._entry = entry

    @signal_handlers.is_gate
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective has really completed; `timeout` is the backend's own."""
        try:
            self._wait()
        except BaseException:
            if waiting:
                signal_handlers.leave(is_from_c=True)
            raise
        if waiting:
            signal_handlers.leave(is_from_c=not is_called_by_python(sys._getframe(1), "wait"))
        return True

    @signal_handlers.gate_from_c
    def synchronize(self) -> None:
        """As wait()."""
        self._wait()

    def _wait(self) -> None:
        entry = self._entry
        if entry.is_read_later and self._is_put_off(entry):
            return
        session = None if entry.is_apart else current()
        try:
            if not entry.is_done:
                if session is not None:
                    session.touch(Phase.WAITING)
                fail_open.run("wait for a collective", self._journal.wait, self._wait_plainly, (entry,), {})
        finally:
            if session is not None:
                session.touch(Phase.COMPUTING)
            elif entry.place:
                entry.group.session[Results].note_return()

    def _is_put_off(self, entry: Entry) -> bool:
        """Let the caller's stream alone wait now, and the host later (waits.py); returns whether it does."""
        entry.is_read_later = False
        if entry.is_done or entry.inner is None:
            return False
        try:
            entry.inner.order()
        except Exception as error:  # aborted meanwhile
            fail_open.raise_if_meant(error)
            return False
        self._journal.put_off(entry)
        return True

    def _wait_plainly(self, entry: Entry) -> None:
        if entry.inner is not None and not entry.is_done:
            entry.inner.wait()

    @signal_handlers.gate_from_c
    def is_completed(self) -> bool:
        """Whether the collective has completed; if so, the script may use its tensors."""
        entry = self._entry
        inner = entry.inner
        if not entry.is_done and inner is not None and has_succeeded(inner):
            entry.group.complete(entry, inner)
        return entry.is_done

    def is_success(self) -> bool:
        """As is_completed(): an operation that failed is issued again in the next generation."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._entry.outputs

    def release(self) -> None:
        """Drop the tensors of a completed operation; wait() still returns at once."""
        entry = self._entry
        self._entry = Entry(entry.group, entry.op, (), [])
        self._entry.is_done = True

    @signal_handlers.gate_from_c
    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors; it stays pending during a recovery.

        On a device a callback that Python code puts behind it runs at once, as on NCCL's and HCCL's futures: so the
        collectives that it issues (PowerSGD's) are in one order in all ranks. The host waits for that.
        """
        entry = self._entry
        if entry.future is not None:
            return entry.future
        if entry.op == "allreduce" and not entry.outputs[0].is_cpu:
            caller = sys._getframe(1).f_back
            if caller is not None and is_called_by_python(caller, "get_future"):
                self._wait()
        future = entry.make_future()
        if entry.is_done:
            entry.settle(entry.outputs)
        elif self._journal.is_frozen and self._journal.is_ended:
            entry.settle(EndedError())
        elif entry.inner is not None:
            entry.group.bridge(entry, entry.inner)
        return future


def is_called_by_python(frame: FrameType, name: str) -> bool:
    """Whether this frame itself calls a method of that name, such as `work.wait()`, rather than C++ that it has
    called."""
    return _calls(frame.f_code, frame.f_lasti, name)


@functools.lru_cache(maxsize=256)
def _calls(code: CodeType, at: int, name: str) -> bool:
    line, _, column, _ = next(itertools.islice(code.co_positions(), at // 2, None))
    named = [instruction.positions for instruction in dis.get_instructions(code) if instruction.argval == name]
    return any(at is not None and (at.lineno, at.col_offset) == (line, column) for at in named)


def wrap_extract_tensors(original: Any) -> Any:
    """torch._jit_internal._extract_tensors: return the list of one tensor that our futures hold.

    torch would pickle it to find the tensor, each time that DDP reads a bucket's result: about 80 µs with cold caches.
    """

    def extract(value: Any) -> Any:
        if type(value) is list and len(value) == 1 and type(value[0]) is torch.Tensor:
            return value
        return original(value)

    return extract


class Refused:
    """Like a failed work of the backend: an operation that the device or the connection refused with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error.with_traceback(None)

    def wait(self, *limit: Any) -> bool:
        """As Work.wait. Raises the error."""
        raise self._error.with_traceback(None)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        """A failed future."""
        promise: torch.futures.Future[Any] = torch.futures.Future()
        failed = promise.then(lambda _: self.wait())
        promise.set_result(None)
        return failed


# Keep works alive that C++ may still wait for, before torch 2.9.
#
# DDP's reducer and the functional collectives hold our works in C++ alone. In those versions their Python part dies
# with Python's last reference, and C++ then waits for ever in the base class. So the newest works are held here;
# completed ones without their tensors, unless Python code holds them too.

LOSES_WORKS = torch_versions.loses_works(torch.__version__)
_MOST_HELD = 4096
_under_way: deque[ManagedWork] = deque(maxlen=_MOST_HELD)
_completed: deque[ManagedWork] = deque(maxlen=_MOST_HELD)


def hold(work: Any) -> Any:
    """Keep a new work alive; returns it."""
    while _under_way and _under_way[0].is_completed():
        over = _under_way.popleft()
        if sys.getrefcount(over) == 2:  # `over` itself, and the argument
            over.release()
            _completed.append(over)
    _under_way.append(work)
    return work
