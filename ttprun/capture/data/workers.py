"""Random states of DataLoader workers, so that a replacement's workers draw the same as the lost rank's.

A worker draws from its own generators, batch after batch, ahead of the training. Before it hands one over, it writes
its states to a ring in the rank's recorder, which outlives both. A replacement's worker that begins at batch k restores
the states with which the lost one was to begin it, also if it had not begun it yet. A worker that is not forked from
the rank (spawn, forkserver) is given the recorder with its main function, whose pickled form is ours (`_Loop`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import msgpack

from ttprun.capture.host import current
from ttprun.capture.records.recorder import WORKER_BATCHES, Recorder
from ttprun.introspect import children, random_state


@dataclass
class Making:
    """The iterator that is being made, for its workers.

    key      (number of the iterator in the process, number of the epoch with these workers)
    skip     batches that are skipped
    """

    key: tuple[int, int]
    skip: int = 0


_making: Making | None = None
_recorder: Recorder | None = None
_MODULE = "torch.utils.data._utils.worker"  # has the main function of a worker, by which it is started


class _Loop:
    """The main function of the workers of one iterator: in a forked one it is `loop`, in another one `_Followed`."""

    def __init__(self, loop: Any, making: Making, recorder: Recorder, run_dir: str) -> None:
        self.loop = loop
        self._making = making
        self._recorder = recorder
        self._run_dir = run_dir

    def __call__(self, *args: Any) -> None:
        self.loop(*args)

    def __reduce__(self) -> Any:
        recorder = self._recorder
        shared = reduction.DupFd(recorder.fd)
        return _Followed, (self._making.key, self._making.skip, shared, recorder.slot_bytes, self._run_dir)


class _Followed:
    """The loop of a worker that is not forked from the rank: torch's own, followed."""

    def __init__(self, key: tuple[int, int], skip: int, recorder: Any, slot_bytes: int, run_dir: str) -> None:
        self._making = Making(key, skip)
        self._fd = recorder.detach()
        self._slot_bytes = slot_bytes
        self._run_dir = run_dir

    def __call__(self, *args: Any) -> None:
        from torch.utils.data._utils.worker import _worker_loop

        children.note(self._run_dir)
        _follow(self._making, Recorder(self._fd, self._slot_bytes), args[10], args[11])
        _worker_loop(*args)


def keep_in(recorder: Recorder) -> None:
    """Have this rank's workers write their states to its recorder."""
    global _recorder
    _recorder = recorder


def will_make(making: Making | None) -> None:
    """Workers started from now on belong to this iterator; None: to none of ours."""
    global _making
    _making = making
    module: Any = sys.modules.get(_MODULE)
    if module is None or _recorder is None or (session := current()) is None:
        return
    if isinstance(module._worker_loop, _Loop):
        module._worker_loop = module._worker_loop.loop
    if making is not None:
        module._worker_loop = _Loop(module._worker_loop, making, _recorder, session.run_dir)


def wrap_worker_loop(original: Any) -> Any:
    """The main function of a worker process: keep its random states, batch by batch."""

    def worker_loop(*args: Any) -> None:
        if _making is not None and _recorder is not None:
            worker, workers = args[10], args[11]
            _follow(_making, _recorder, worker, workers)
        original(*args)

    return worker_loop


def _follow(making: Making, recorder: Recorder, worker: int, workers: int) -> None:
    """In the worker: wrap the function that fetches batches."""
    from torch.utils.data import _DatasetKind

    kind: Any = _DatasetKind
    create = kind.create_fetcher
    epoch = making.key[1] - 1

    def create_fetcher(*args: Any) -> Any:
        nonlocal epoch
        epoch += 1
        fetcher = create(*args)
        fetch = fetcher.fetch
        # Workers begin with a later epoch than their first only in a replay of persistent workers.
        is_resumed = epoch == making.key[1] and (making.skip > 0 or epoch > 0)
        # Batch k belongs to worker k mod n; this is how many of its own are skipped.
        number = (making.skip - worker + workers - 1) // workers if is_resumed else 0
        iterator = making.key[0]
        if is_resumed:
            _restore(recorder, iterator, worker, (epoch, number))

        def keep() -> None:
            recorder.write_worker((iterator, epoch, worker, number), msgpack.packb(random_state.capture()))

        def follow(index: Any) -> Any:
            nonlocal number
            batch = fetch(index)
            number += 1
            keep()
            return batch

        keep()
        fetcher.fetch = follow
        return fetcher

    kind.create_fetcher = staticmethod(create_fetcher)


def _restore(recorder: Recorder, iterator: int, worker: int, when: tuple[int, int]) -> None:
    """Restore the states that the lost rank's worker had at `when`: before a batch of an epoch.

    Raises RuntimeError, which the DataLoader raises in the rank, if they are not kept any more.
    """
    states = recorder.worker_states(iterator, worker)
    _, number = when
    state = states.get(when)
    if state is None and number == 0:  # the lost worker had not begun this epoch
        state = next((states[earlier] for earlier in sorted(states, reverse=True) if earlier < when), None)
    elif state is None and states:
        state = next(iter(states.values()))
        if any(other != state for other in states.values()):
            raise RuntimeError(
                f"the random states of DataLoader worker {worker} before its batch {number} are not kept any more: it"
                f" has prepared more than {WORKER_BATCHES - 1} further ones (prefetch_factor)"
            )
    if state is not None:
        random_state.restore(msgpack.unpackb(state))
