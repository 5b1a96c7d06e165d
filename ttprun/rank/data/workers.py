"""Random states of DataLoader workers, so that a replacement's workers draw the same as the lost rank's.

A worker draws from its own generators, batch after batch, ahead of the training. Before it hands one over, it writes
its states to a ring in the rank's recorder, which outlives both. A replacement's worker that begins at batch k restores
the states with which the lost one was to begin it, also if it had not begun it yet. Spawned workers have no recorder;
their batches are compared like all others (batches.py), and a difference ends the replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from ttprun.rank.process import random_state
from ttprun.rank.records.recorder import WORKER_BATCHES, Recorder


@dataclass
class Making:
    """The iterator that is being made, for its forked workers.

    key      (number of the iterator in the process, number of the epoch with these workers)
    skip     batches that are skipped
    """

    key: tuple[int, int]
    skip: int = 0


_making: Making | None = None
_recorder: Recorder | None = None


def keep_in(recorder: Recorder) -> None:
    """Have this rank's workers write their states to its recorder."""
    global _recorder
    _recorder = recorder


def will_make(making: Making | None) -> None:
    """Workers forked from now on belong to this iterator."""
    global _making
    _making = making


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
    found = states.get(when)
    if found is None and number == 0:  # the lost worker had not begun this epoch
        found = next((states[known] for known in sorted(states, reverse=True) if known < when), None)
    elif found is None and states:
        found = next(iter(states.values()))
        if any(known != found for known in states.values()):
            raise RuntimeError(
                f"the random states of DataLoader worker {worker} before its batch {number} are not kept any more: it"
                f" has prepared more than {WORKER_BATCHES - 1} further ones (prefetch_factor)"
            )
    if found is not None:
        random_state.restore(msgpack.unpackb(found))
