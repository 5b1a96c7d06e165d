"""Positions of DataLoader iterators, and making one in a replay that begins there.

An iterator's state is: the random states with which it was made (they give the shuffle and the workers' seeds), the
sampler's epoch, and how many batches it has handed out. A replay makes it with the same states and lets the sampler
pass over the batches that were handed out, without loading them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as torch_dataloader
from torch.utils.data import DataLoader, Sampler

from ttprun.rank import random_state, workers
from ttprun.rank.frames import location_key
from ttprun.rank.session import current
from ttprun.rank.values import fingerprint, streams

_iterators: list[weakref.ref[Any]] = []  # a WeakSet takes ten times as long to tell that it is empty
_made: Counter[str] = Counter()
_order = itertools.count()
_positioned = 0


def wrap_init(original: Any) -> Any:
    """DataLoader.__init__: remember where in the script the loader was made; that names it in every rank."""

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        place = location_key()
        _made[place] += 1
        object.__setattr__(self, "_ttprun_name", [place, _made[place]])
        original(self, *args, **kwargs)

    return init


def wrap_iter(original: Any) -> Any:
    """DataLoader.__iter__: note the state with which the iterator is made; in a replay, set it first."""

    def make(self: DataLoader[Any]) -> Any:
        session = current()
        if session is None:
            return original(self)
        name = getattr(self, "_ttprun_name", ["", 0])
        if session.replay is not None:
            recorded = session.replay.iterator_to_make(name)
            if recorded is not None:
                return _make_at(original, self, recorded)
        began = _beginning(self, name)
        began["workers"] = _workers_key(self)
        workers.will_make(workers.Making(tuple(began["workers"])))
        iterator = original(self)
        workers.will_make(None)
        _register(iterator, began)
        return iterator

    return make


def _workers_key(loader: DataLoader[Any]) -> list[int]:
    """[number of the iterator that has the workers, epoch that they work on]."""
    persistent = getattr(loader, "_iterator", None)
    if persistent is not None and hasattr(persistent, "_ttprun"):
        number, epoch = persistent._ttprun["workers"]
        return [number, epoch + 1]
    return [next(_order), 0]


def _beginning(loader: DataLoader[Any], name: list[Any]) -> dict[str, Any]:
    return {
        "name": name,
        "rng": random_state.capture(),
        "epochs": [getattr(sampler, "epoch", None) for sampler in _samplers(loader)],
        "generators": [generator.get_state().numpy().tobytes() for generator in _generators(loader)],
        "lead": 0,
    }


def _register(iterator: Any, began: dict[str, Any]) -> None:
    iterator._ttprun = began
    iterator._ttprun_order = next(_order)
    iterator._ttprun_batch = None
    for worker in getattr(iterator, "_workers", ()):
        streams.is_worker(worker)
    _iterators[:] = [known for known in _iterators if known() not in (None, iterator)]
    _iterators.append(weakref.ref(iterator))


def _make_at(original: Any, loader: DataLoader[Any], recorded: dict[str, Any]) -> Any:
    global _positioned
    for sampler, epoch in zip(_samplers(loader), recorded["epochs"], strict=False):
        if epoch is not None and hasattr(sampler, "epoch"):
            sampler.epoch = epoch
    _set_random_states(loader, recorded)
    skip = max(0, recorded["yielded"] - max(1, recorded["lead"]))
    is_iterable = loader._dataset_kind == torch_dataloader._DatasetKind.Iterable
    Skipping.batches = 0 if is_iterable else skip
    if recorded["workers"][1]:
        # The lost rank's iterator was begun again here, which draws no seed for its workers, as making one does.
        Skipping.before_first = functools.partial(_set_random_states, loader, recorded)
    workers.will_make(workers.Making(tuple(recorded["workers"]), Skipping.batches))
    iterator = original(loader)
    workers.will_make(None)
    # Without workers no index has been asked for yet, and another iterator may be made before that.
    iterator._ttprun_skip, Skipping.batches = Skipping.batches, 0
    Skipping.before_first = None
    if is_iterable:  # there is no sampler to advance: the batches have to be loaded
        for _ in range(skip):
            next(iterator)
    iterator._num_yielded = skip
    began = ("name", "rng", "epochs", "generators", "lead", "workers")
    _register(iterator, {key: recorded[key] for key in began})
    _positioned += 1
    return iterator


def _set_random_states(loader: DataLoader[Any], recorded: dict[str, Any]) -> None:
    for generator, state in zip(_generators(loader), recorded["generators"], strict=False):
        generator.set_state(random_state.tensor_from_bytes(state))
    random_state.restore(recorded["rng"])


class Skipping:
    """Set while an iterator is made in a replay, for when it asks its sampler for the first time.

    batches       that it has to pass over
    before_first  called before the sampler begins
    """

    batches = 0
    before_first: Callable[[], None] | None = None


def wrap_next_index(original: Any) -> Any:
    """_BaseDataLoaderIter._next_index, in a replay: pass over batches that were handed out."""

    def next_index(self: Any) -> Any:
        skip, Skipping.batches = Skipping.batches or self.__dict__.pop("_ttprun_skip", 0), 0
        before_first, Skipping.before_first = Skipping.before_first, None
        if before_first is not None:
            before_first()
        for _ in range(skip):
            next(self._sampler_iter)
        if skip and hasattr(self, "_worker_queue_idx_cycle"):  # batch k belongs to worker k mod n
            for _ in range(skip % self._num_workers):
                next(self._worker_queue_idx_cycle)
        return original(self)

    return next_index


def forget() -> None:
    """The run of the script is over: its workers end, and names begin anew."""
    global _order, _positioned
    for iterator in _alive():
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    _iterators.clear()
    _made.clear()
    _order = itertools.count()
    _positioned = 0
    workers.will_make(None)
    Skipping.batches = 0
    Skipping.before_first = None


def iterator_types() -> tuple[type, ...]:
    """The classes of DataLoader iterators."""
    return (torch_dataloader._BaseDataLoaderIter,)


def positioned() -> int:
    """How many iterators a replay has put at their place so far."""
    return _positioned


def records() -> list[dict[str, Any]]:
    """The iterators that are under way, oldest first."""
    if not _iterators:
        return []
    alive = _alive()
    under_way = [number for number in range(len(alive)) if _is_under_way(alive, number)]
    found = [alive[number] for number in sorted(under_way, key=lambda number: alive[number]._ttprun_order)]
    return [
        dict(iterator._ttprun, yielded=iterator._num_yielded, batch=_fingerprints(iterator._ttprun_batch))
        for iterator in found
    ]


def _alive() -> list[Any]:
    return [iterator for known in _iterators if (iterator := known()) is not None]


def _fingerprints(batch: Any) -> list[bytes]:
    """Hashes of a batch's tensors: a replay must come to the same data."""
    if isinstance(batch, torch.Tensor):
        return [fingerprint(batch)] if batch.layout is torch.strided else []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [found for item in batch[:8] for found in _fingerprints(item)]
    return []


def _is_under_way(alive: list[Any], number: int) -> bool:
    """Whether the script is inside of an iterator; if its workers persist, the loader holds it for ever."""
    iterator = alive[number]
    if not iterator._num_yielded or getattr(iterator, "_ttprun_ended", False):
        return False
    is_lasting = getattr(iterator, "_persistent_workers", False)
    del iterator
    return not is_lasting or sys.getrefcount(alive[number]) > _HELD_BY_ONE


def _references_of_one() -> int:
    class Holder:
        held: Any

    Holder.held = object()
    alive = [Holder.held]
    return sys.getrefcount(alive[0])


# What getrefcount() says of an object in a list that one more holds.
_HELD_BY_ONE = _references_of_one()


def note_boundary() -> None:
    """The first boundary after an iterator was made tells how far its reader reads ahead."""
    for iterator in _alive():
        if iterator._num_yielded and not iterator._ttprun["lead"]:
            iterator._ttprun["lead"] = iterator._num_yielded


def wrap_next(original: Any) -> Any:
    """_BaseDataLoaderIter.__next__: know the newest batch, and when there is none any more."""

    def advance(self: Any) -> Any:
        try:
            self._ttprun_batch = original(self)
            return self._ttprun_batch
        except StopIteration:
            self._ttprun_ended = True
            self._ttprun_batch = None
            raise

    return advance


def wrap_reset(original: Any) -> Any:
    """_BaseDataLoaderIter._reset: with persistent workers the same iterator begins again."""

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        self._ttprun_ended = False
        original(self, loader, first_iter)

    return reset


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found: list[Any] = []
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        while isinstance(sampler, Sampler) and all(sampler is not known for known in found):
            found.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    return found


def _generators(loader: DataLoader[Any]) -> list[Any]:
    found: list[Any] = []
    for generator in (loader.generator, *(getattr(sampler, "generator", None) for sampler in _samplers(loader))):
        if generator is not None and all(generator is not known for known in found):
            found.append(generator)
    return found
