"""Random states of DataLoader workers, so that a replacement's workers draw the same as the lost rank's.

A worker draws from its own generators, batch after batch, ahead of the training. Before each batch it writes its states
to a ring in the rank's recorder, which outlives both; a replacement's worker that begins at batch k restores the states
of the lost one before batch k. Spawned workers have no recorder; their batches are compared like all others
(batches.py), and a difference ends the replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from ttprun.rank.process import random_state
from ttprun.rank.records.recorder import Recorder


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
        is_first = is_resumed

        def follow(index: Any) -> Any:
            nonlocal number, is_first
            place = (making.key[0], epoch, worker, number)
            if is_first:
                is_first = False
                found = recorder.read_worker(place)
                if found is not None:
                    random_state.restore(msgpack.unpackb(found))
            recorder.write_worker(place, msgpack.packb(random_state.capture()))
            number += 1
            return fetch(index)

        fetcher.fetch = follow
        return fetcher

    kind.create_fetcher = staticmethod(create_fetcher)
