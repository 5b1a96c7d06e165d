"""Random states of DataLoader workers, so that a replacement's workers draw the same as the lost rank's.

A worker draws from its own generators, batch after batch, ahead of the training. Before it hands one over, it writes
its states, and a digest of the batch, to a ring in the rank's recorder, which outlives both. A replacement's worker
that begins at batch k restores the states with which the lost one was to begin it, also if it had not begun it yet;
what it then makes is compared with what the lost one had prepared. Workers are followed where they make what fetches
batches, whatever their main function is. One that is not forked from the rank (spawn, forkserver) is given the recorder
with its main function, whose pickled form is ours (`_Loop`).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import reduction
from typing import Any

import msgpack
import xxhash

from ttprun.capture.host import current
from ttprun.capture.records.recorder import WORKER_BATCHES, Recorder
from ttprun.introspect import children, random_state


class OtherBatchError(RuntimeError):
    """A replacement's worker does not prepare what the lost rank's had; the DataLoader raises it in the rank."""


@dataclass
class Making:
    """The iterator that is being made, for its workers.

    key        (number of the iterator in the process, number of the epoch with these workers)
    skip       batches that are skipped
    is_again   a replay makes it, in the place of the lost rank's
    """

    key: tuple[int, int]
    skip: int = 0
    is_again: bool = False


_recorder: Recorder | None = None
# Where iterators find the main function of a worker, by which it is started.
_STARTED_BY = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.stateful_dataloader")


class _Loop:
    """The main function of the workers of one iterator, as it is pickled for one that is not forked: `_followed`."""

    def __init__(self, loop: Any, making: Making, recorder: Recorder, run_dir: str) -> None:
        self.loop = loop
        self._making = making
        self._recorder = recorder
        self._run_dir = run_dir

    def __call__(self, *args: Any) -> None:
        self.loop(*args)

    def __reduce__(self) -> Any:
        shared = reduction.DupFd(self._recorder.fd)
        # By its names: in this process this object stands in its place.
        loop = (self.loop.__module__, self.loop.__qualname__)
        return _followed, (*loop, self._making, shared, self._recorder.slot_bytes, self._run_dir)


def _followed(module: str, name: str, making: Making, recorder: Any, slot_bytes: int, run_dir: str) -> Any:
    """In a worker that is not forked from the rank: its main function, followed."""
    children.note(run_dir)
    _follow(making, Recorder(recorder.detach(), slot_bytes))
    return getattr(import_module(module), name)


def keep_in(recorder: Recorder) -> None:
    """Have this rank's workers write their states to its recorder."""
    global _recorder
    _recorder = recorder


def will_make(making: Making | None) -> None:
    """Workers started from now on belong to this iterator; None: to none of ours."""
    from torch.utils.data import _DatasetKind

    kind: Any = _DatasetKind
    if isinstance(kind.create_fetcher, _Fetchers):
        kind.create_fetcher = staticmethod(kind.create_fetcher.create)
    modules: list[Any] = [sys.modules[name] for name in _STARTED_BY if name in sys.modules]
    for module in modules:
        if isinstance(module._worker_loop, _Loop):
            module._worker_loop = module._worker_loop.loop
    if making is None or _recorder is None or (session := current()) is None:
        return
    _follow(making, _recorder)
    for module in modules:
        module._worker_loop = _Loop(module._worker_loop, making, _recorder, session.run_dir)


def has_followed(iterator: int, workers: int) -> bool:
    """Whether one of the workers of an iterator has written its states; each does before its first batch.

    iterator   its number in the process
    """
    return _recorder is None or any(_recorder.worker_states(iterator, worker) for worker in range(workers))


def _follow(making: Making, recorder: Recorder) -> None:
    from torch.utils.data import _DatasetKind

    kind: Any = _DatasetKind
    kind.create_fetcher = _Fetchers(making, recorder, kind.create_fetcher)


class _Fetchers:
    """Makes what fetches batches, as torch does; in a worker it is followed, epoch by epoch."""

    def __init__(self, making: Making, recorder: Recorder, create: Any) -> None:
        self.create = create
        self._making = making
        self._recorder = recorder
        self._epoch = making.key[1] - 1
        self._left: dict[tuple[int, int], bytes] | None = None

    def __call__(self, *args: Any) -> Any:
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        if info is None:
            return self.create(*args)
        self._epoch += 1
        making, worker = self._making, info.id
        if self._left is None:  # by the lost rank's worker
            self._left = self._recorder.worker_states(making.key[0], worker) if making.is_again else {}
        # Workers begin with a later epoch than their first only in a replay of persistent workers.
        is_resumed = making.is_again and self._epoch == making.key[1] and (making.skip > 0 or self._epoch > 0)
        # Batch k belongs to worker k mod n; this is how many of its own are skipped.
        number = (making.skip - worker + info.num_workers - 1) // info.num_workers if is_resumed else 0
        if is_resumed:
            _restore(self._left, worker, (self._epoch, number))
        self._keep(worker, number, 0)
        fetcher = self.create(*args)  # a stream may draw here
        fetcher.fetch = functools.partial(self._fetch, fetcher.fetch, worker, iter(range(number + 1, sys.maxsize)))
        return fetcher

    def _fetch(self, fetch: Any, worker: int, numbers: Any, index: Any) -> Any:
        batch = fetch(index)
        number, digest = next(numbers), _digest(batch)
        _, lost = _unpack((self._left or {}).get((self._epoch, number)))
        self._keep(worker, number, digest)
        if lost and digest and lost != digest:
            raise OtherBatchError(
                f"worker {worker} of a DataLoader prepares another batch {number} than the lost rank's had, so its "
                "dataset depends on something that is neither recorded nor made again by the script's setup"
            )
        return batch

    def _keep(self, worker: int, number: int, digest: int) -> None:
        place = (self._making.key[0], self._epoch, worker, number)
        self._recorder.write_worker(place, msgpack.packb((random_state.capture(), digest)))


def _digest(batch: Any) -> int:
    """Of all of a batch; 0: it has none."""
    from ttprun.capture.data import loader_parts

    try:
        return xxhash.xxh3_64_intdigest(b"".join(loader_parts.fingerprints(batch)))
    except Exception:  # whatever the script's objects do when they are looked at
        return 0


def _unpack(packed: bytes | None) -> tuple[Any, int]:
    """(random states, digest of the batch before)."""
    states, digest = msgpack.unpackb(packed) if packed else (None, 0)
    return states, digest


def _restore(of_lost: dict[tuple[int, int], bytes], worker: int, when: tuple[int, int]) -> None:
    """Restore the states that the lost rank's worker had at `when`: before a batch of an epoch.

    of_lost   what the lost one has left

    Raises OtherBatchError if they are not kept any more.
    """
    _, number = when
    state, _ = _unpack(of_lost.get(when))
    if state is None and number == 0:  # the lost worker had not begun this epoch
        newest = next((of_lost[earlier] for earlier in sorted(of_lost, reverse=True) if earlier < when), None)
        state, _ = _unpack(newest)
    elif state is None and of_lost:
        state, *others = (_unpack(packed)[0] for packed in of_lost.values())
        if any(other != state for other in others):
            raise OtherBatchError(
                f"the random states of DataLoader worker {worker} before its batch {number} are not kept any more: it"
                f" has prepared more than {WORKER_BATCHES - 1} further ones (prefetch_factor)"
            )
    if state is not None:
        random_state.restore(state)
