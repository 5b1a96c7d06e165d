"""The simulated NPU's collectives: HCCL's part of a process group, without HCCL.

Data goes over whatever links the group has, gloo's in truth; here stands only what a device adds to them: operations
fail while the device's queue does not run, they are aborted when it is stopped, and the communicator takes none after
that before `reinit_process_group` has had it. Begin with `SimulatedHccl.issue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any


class SimulatedHccl:
    """The communicators of one group, for as long as the group lives; the links below it may be exchanged.

    operate      raises what any operation on the device meets, given its input tensors
    stopped      what an operation meets after the device was stopped
    is_stopped   since then nothing has brought the communicator back
    calls        operation -> how often it was issued
    """

    def __init__(self, operate: Callable[[Iterable[Any]], None], stopped: RuntimeError) -> None:
        self._operate = operate
        self._stopped = str(stopped)
        self.is_stopped = False
        self.calls: Counter[str] = Counter()

    def issue(self, links: Any, op: str, args: tuple[Any, ...], inputs: Iterable[Any]) -> SimulatedWork:
        """Issue an operation over the links. Raises RuntimeError, what the device meets."""
        self.check(inputs)
        self.calls[op] += 1
        return SimulatedWork(self, links.issue(op, args))

    def check(self, inputs: Iterable[Any] = ()) -> None:
        """Raises RuntimeError while nothing can be done on the device, or with these tensors."""
        self._operate(inputs)
        if self.is_stopped:
            raise RuntimeError(self._stopped)


class SimulatedWork:
    """An operation that is under way. If the device stops working under it, it has failed for good.

    It is completed only when the links below have let go of its tensors too.
    """

    def __init__(self, communicator: SimulatedHccl, below: Any) -> None:
        self._communicator = communicator
        self._below = below
        self._error = ""

    def wait(self, *limit: Any) -> bool:
        """As Work.wait: blocks for so long at most. Raises RuntimeError, if no limit is given at once."""
        if limit or not self._has_failed():
            try:
                self._below.wait(*limit)
            except RuntimeError:
                if not self._has_failed():
                    raise
        if self._has_failed():
            raise RuntimeError(self._error)
        return True

    def _has_failed(self) -> bool:
        if not self._error:
            try:
                self._communicator.check()
            except RuntimeError as error:
                self._error = str(error)
        return bool(self._error)

    def is_completed(self) -> bool:
        """It has succeeded, or has failed and touches no tensor any more."""
        completed: bool = self._below.is_completed()
        return completed

    def is_success(self) -> bool:
        """It has completed, and not failed."""
        return not self._error and bool(self._below.is_success())

    def get_future(self) -> Any:
        """Of the outputs; it fails as `wait` does, once the links have let go."""
        return self._below.get_future().then(self._value)

    def _value(self, below: Any) -> Any:
        if self._has_failed():
            raise RuntimeError(self._error)
        return below.value()
