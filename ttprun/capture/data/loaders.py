"""Positions of DataLoader iterators, and making an iterator in a replay that begins there.

The set-up may have run over the same loader already (an evaluation of the untrained model). A replay does so again, as
in a run: the record of an iterator says where in the script such earlier ones were made.

An iterator's state is: the random states with which it was made (they determine the shuffle and the workers' seeds),
the sampler's epoch, and the number of batches that it has yielded. A replay makes it with the same states and lets the
sampler skip those batches, without loading them. Without workers the sampler begins only with the first batch: what has
changed by then (a framework may set a sampler's epoch after it has made the iterator) is noted.

torchdata's StatefulDataLoader counts what its sampler and dataset have given, for its `state_dict`: a replay takes the
batches that were used from it again, as from a stream. What any other class hands out is noted, but not made again.

A resume with another number of ranks makes iterators over the rest of their epoch (`rest_of_epoch.py`); such an
iterator has a "rest" in its record, and is made again in the same way.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data.dataloader as torch_dataloader
from torch.utils.data import DataLoader

from ttprun.capture.data import rest_of_epoch, workers
from ttprun.capture.data.rest_of_epoch import fetched_ahead
from ttprun.capture.position import placeholders
from ttprun.capture.values import process_objects
from ttprun.introspect import random_state
from ttprun.introspect.costs import DATA
from ttprun.introspect.current_rank import current
from ttprun.introspect.ownership import location_key
from ttprun.protocol.reason import Reason

_iterators: list[weakref.ref[Any]] = []  # a WeakSet's emptiness check takes ten times as long
_made: Counter[str] = Counter()
_each: dict[tuple[Any, ...], int] = {}  # loader's name: batches between two boundaries
_order = itertools.count()
_earlier: dict[tuple[Any, ...], list[str]] = {}  # loader's name: where iterators were made that ended before any step
_MOST_EARLIER = 64  # of one loader
_has_stepped = False
_is_making = False  # an iterator, which may read ahead itself
_not_recorded: list[Reason] = []  # loaders whose next batches may be others, and why
_draining = 0  # number of next boundaries whose steps train on batches of an iterator that has ended


def wrap_init(original: Any) -> Any:
    """DataLoader.__init__: name the loader by the place in the script that made it, the same in every rank."""

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        place = location_key()
        _made[place] += 1
        object.__setattr__(self, "_ttprun_name", [place, _made[place]])
        original(self, *args, **kwargs)

    return init


def made() -> dict[str, int]:
    """How many loaders were made at each place of the script."""
    return dict(_made)


def count_on(from_: dict[str, int]) -> None:
    """Loaders that are made from now on are named as in a process that had made so many; see `made`."""
    dict.update(_made, from_)  # a Counter's own would add them up


def wrap_iter(original: Any) -> Any:
    """DataLoader.__iter__: note the state with which the iterator is made; in a replay, restore it first."""

    def make(self: DataLoader[Any]) -> Any:
        session = current()
        if session is None:
            return original(self)
        name = getattr(self, "_ttprun_name", ["", 0])
        recorded = session.mode.iterator_to_make(self, name)
        if recorded is not None:
            return _make_at(original, self, recorded)
        try:
            began = _beginning(self, name)
        except Exception as error:  # fail open
            session.give_up_protection(
                Reason(
                    "state-unreadable", f"the state of the DataLoader made at {name[0]} cannot be recorded: {error!r}"
                )
            )
            return original(self)
        began["workers"] = _workers_key(self)
        iterator = _make(original, self, workers.Making(tuple(began["workers"])))
        began |= {"from": iterator._num_yielded, "seed": iterator._base_seed}
        _register(iterator, began, self)
        if _asks_late(iterator):
            iterator._ttprun_unbegun = (self, workers.state_of(self))
        return iterator

    return make


def _make(original: Any, loader: DataLoader[Any], making: workers.Making) -> Any:
    """The loader's iterator, whose workers are followed."""
    global _is_making
    workers.will_make(making)
    _is_making = True
    try:
        return original(loader)
    except workers.OtherBatchError as error:
        _refuse(error)
        raise
    finally:
        _is_making = False
        workers.will_make(None)


def _refuse(error: workers.OtherBatchError) -> None:
    if (session := current()) is not None:
        session.observers.refuse(Reason("other-batch", str(error)))


def _workers_key(loader: DataLoader[Any]) -> list[int]:
    """[number of the iterator that owns the workers, their epoch]."""
    persistent: Any = getattr(loader, "_iterator", None)
    if getattr(persistent, "_persistent_workers", False) and hasattr(persistent, "_ttprun"):
        number, epoch = persistent._ttprun["workers"]
        return [number, epoch + 1]
    return [next(_order), 0]


def _number_on_from(number: int) -> None:
    """Iterators that are made from now on have other numbers than this one."""
    global _order
    _order = itertools.count(max(next(_order), number + 1))


def _beginning(loader: DataLoader[Any], name: list[Any]) -> dict[str, Any]:
    return {
        **workers.state_of(loader),
        "first": None,
        "name": name,
        "lead": 0,
        "each": _each.get(tuple(name), 0),
        "place": _note_made(name),
        "source": rest_of_epoch.source_of(loader),
        "rest": None,
        "resumed": workers.resumed_from(loader),
    }


def _note_made(name: list[Any]) -> str:
    """Where in the script an iterator over the loader of this name is made; remembered up to the first step."""
    place, places = location_key(), _earlier.setdefault(tuple(name), [])
    if not _has_stepped and len(places) < _MOST_EARLIER:
        places.append(place)
    return place


def _asks_late(iterator: Any) -> bool:
    """Whether it has no workers, and asks its sampler with the first batch."""
    return not iterator._num_workers


def _note_first(iterator: Any, loader: DataLoader[Any], made_with: dict[str, Any]) -> None:
    """An iterator is about to ask its sampler: is anything else than it was when it was made?"""
    now = workers.state_of(loader)
    if now != made_with:
        iterator._ttprun["first"] = now


def _register(iterator: Any, began: dict[str, Any], loader: Any) -> None:
    iterator._ttprun = began
    iterator._ttprun_is_kept = getattr(loader, "_iterator", None) is iterator
    iterator._ttprun_batch = None
    for worker in getattr(iterator, "_workers", ()):
        process_objects.is_worker(worker)
    iterator._ttprun_at = None
    iterator._ttprun_recent = []
    if _asks_late(iterator) and iterator._dataset_kind == torch_dataloader._DatasetKind.Iterable:
        iterator._ttprun_left = None  # random states after the batch before
        iterator._next_data = functools.partial(_read_first, iterator._next_data, iterator)
    _iterators[:] = [reference for reference in _iterators if reference() not in (None, iterator)]
    _iterators.append(weakref.ref(iterator))


def _make_at(original: Any, loader: DataLoader[Any], recorded: dict[str, Any]) -> Any:
    global _has_stepped
    recorded = {"from": 0, "seed": None, "resumed": b""} | recorded  # one of an older record has none of these
    workers.put_back(loader, recorded)
    skip = max(0, recorded["yielded"] - recorded["from"] - max(1, recorded["lead"]))
    is_read = workers.resume_again(loader, recorded["resumed"])
    is_read = is_read or loader._dataset_kind == torch_dataloader._DatasetKind.Iterable
    Skipping.batches, Skipping.seed = 0 if is_read else skip, recorded["seed"]
    if recorded["rest"] is not None:
        Skipping.stream = rest_of_epoch.batches_of(loader, recorded["rest"])
    own_workers = recorded["workers"] or _workers_key(loader)
    _number_on_from(own_workers[0])
    if own_workers[1]:
        # The lost rank's persistent iterator was restarted here; unlike making one, that draws no seed for workers.
        Skipping.before_first = functools.partial(workers.set_random_states, loader, recorded)
    iterator = _make(original, loader, workers.Making(tuple(own_workers), Skipping.batches, is_again=True))
    # Without workers no index has been requested yet, and another iterator may be made first.
    iterator._ttprun_skip, Skipping.batches = Skipping.batches, 0
    iterator._ttprun_stream, Skipping.stream = Skipping.stream, None
    Skipping.before_first, Skipping.seed = None, None
    if _asks_late(iterator):
        first = recorded.get("first") or workers.state_of(loader)
        iterator._ttprun_before_first = functools.partial(workers.put_back, loader, first)
    _earlier[tuple(recorded["name"])] = recorded.get("earlier", [])
    _has_stepped = True
    if recorded["each"]:
        _each[tuple(recorded["name"])] = recorded["each"]
    left_out = ("yielded", "batch", "ahead", "earlier")
    began = {key: value for key, value in recorded.items() if key not in left_out}
    _register(iterator, began | {"workers": own_workers}, loader)
    if is_read:  # the batches have to be loaded
        for _ in range(skip):
            next(iterator)
        iterator._ttprun_batch = None
    else:
        iterator._num_yielded = skip
    iterator._ttprun_passed_over = skip
    return iterator


class Skipping:
    """Set while an iterator is made in a replay, for its sampler's first index.

    batches       to skip
    before_first  called before the sampler begins
    stream        of batches that replaces the sampler's
    seed          of the lost rank's workers
    """

    batches = 0
    before_first: Callable[[], None] | None = None
    stream: Iterator[Any] | None = None
    seed: int | None = None


def wrap_iterator_init(original: Any) -> Any:
    """_BaseDataLoaderIter.__init__, in a replay: its workers get the seed of the lost rank's."""

    def init(self: Any, loader: DataLoader[Any]) -> None:
        original(self, loader)
        if Skipping.seed is not None:
            self._base_seed = Skipping.seed

    return init


def wrap_next_index(original: Any) -> Any:
    """_BaseDataLoaderIter._next_index, in a replay: skip batches that were used."""

    def next_index(self: Any) -> Any:
        skip, Skipping.batches = Skipping.batches or self.__dict__.pop("_ttprun_skip", 0), 0
        before_first = self.__dict__.pop("_ttprun_before_first", None)
        if before_first is not None:
            before_first()
        stream, Skipping.stream = Skipping.stream or self.__dict__.pop("_ttprun_stream", None), None
        if stream is not None:
            self._sampler_iter = stream
        for _ in range(skip):
            next(self._sampler_iter)
        if skip and hasattr(self, "_worker_queue_idx_cycle"):  # batch k belongs to worker k mod n
            for _ in range(skip % self._num_workers):
                next(self._worker_queue_idx_cycle)
        return original(self)

    return next_index


def forget() -> None:
    """The run of the script is over: end its workers, and start the names again."""
    global _order, _draining, _has_stepped
    for iterator in _alive():
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    _iterators.clear()
    _made.clear()
    _order = itertools.count()
    _draining = 0
    workers.will_make(None)
    _each.clear()
    _earlier.clear()
    _has_stepped = False
    Skipping.batches, Skipping.before_first, Skipping.stream, Skipping.seed = 0, None, None, None
    _not_recorded.clear()


def records() -> list[dict[str, Any]]:
    """The records of the iterators in use, oldest first."""
    alive = _alive()
    return [_record_of(alive[number]) for number in range(len(alive)) if _is_under_way(alive, number)]


def _record_of(iterator: Any) -> dict[str, Any]:
    began = iterator._ttprun
    batch = workers.fingerprints(iterator._ttprun_batch)
    ahead = fetched_ahead(began["lead"], began["each"])
    fetched = _fetched(iterator, batch, ahead) if ahead else []
    earlier = _earlier.get(tuple(began["name"]), [])
    return dict(began, yielded=iterator._num_yielded, batch=batch, ahead=fetched, earlier=earlier)


def _fetched(iterator: Any, batch: list[bytes], ahead: int) -> list[bytes] | None:
    """Fingerprints of all tensors that were fetched and not trained on yet; None if some are unknown.

    batch   fingerprints of the newest batch
    """
    recent, yielded = iterator._ttprun_recent, iterator._num_yielded
    if not recent or recent[-1][0] != yielded:
        recent.append((yielded, batch if workers.is_of_tensors(iterator._ttprun_batch) else None))
    del recent[:-ahead]
    if [number for number, _ in recent] != list(range(yielded - ahead + 1, yielded + 1)):
        return None
    batches = [hashes for _, hashes in recent]
    return None if None in batches else [digest for hashes in batches for digest in hashes]


def _alive() -> list[Any]:
    """The iterators that still exist, oldest first."""
    alive = []
    for reference in _iterators:  # faster than a comprehension
        if (iterator := reference()) is not None:
            alive.append(iterator)
    return alive


def _is_under_way(alive: list[Any], number: int) -> bool:
    """Whether the script is inside an iterator's loop; its loader may hold one for ever."""
    iterator = alive[number]
    if iterator._num_yielded == iterator._ttprun["from"] or getattr(iterator, "_ttprun_ended", False):
        return False
    is_kept = iterator._ttprun_is_kept
    del iterator
    return not is_kept or sys.getrefcount(alive[number]) > _HELD_BY_ONE


def _references_of_one() -> int:
    holder = [object()]
    alive = [*holder]
    return sys.getrefcount(alive[0])


# getrefcount() of an object in a list with one more holder.
_HELD_BY_ONE = _references_of_one()


def note_boundary() -> bool:
    """At each boundary: derive each iterator's batches per step, and batches read ahead, from its first two boundaries.

    returns   whether the step trains on a batch of an iterator that has ended: the script has read ahead, and no record
              contains the batches that it holds
    """
    global _draining, _has_stepped
    is_draining = _draining > 0
    _draining -= is_draining
    if not _has_stepped:
        _has_stepped = True
        alive = _alive()
        for began in (alive[number]._ttprun for number in range(len(alive)) if _is_under_way(alive, number)):
            if began["place"] in (places := _earlier.get(tuple(began["name"]), [])):
                places.remove(began["place"])
    if not _iterators:
        return is_draining
    for iterator in _alive():
        began, at, yielded = iterator._ttprun, iterator._ttprun_at, iterator._num_yielded
        if yielded > began["from"] and not began["lead"]:
            began["lead"] = yielded - began["from"]
            if iterator._num_workers and not workers.has_followed(began["workers"][0], iterator._num_workers):
                _name(iterator, began["name"][0], "what its workers draw is not recorded")
        elif at and yielded > at:
            began["each"] = _each[tuple(began["name"])] = yielded - at
        iterator._ttprun_at = yielded
    return is_draining


def _read_first(original: Any, iterator: Any) -> Any:
    """One of the first batches of a stream that this process reads: does it draw where the training draws, too?

    A replay reads the stream again from its beginning, without the steps in between.
    """
    before = random_state.capture()
    batch = original()
    session, after, left = current(), random_state.capture(), iterator._ttprun_left
    if session is None or not session.mode.is_live:
        return batch
    iterator._ttprun_left = after
    if left is not None:
        del iterator._next_data
        if shared := [kind for kind in after if kind in left and left[kind] != before[kind] != after[kind]]:
            why = f"it draws random numbers ({', '.join(shared)}) where the training does, and a replay cannot"
            _name(iterator, iterator._ttprun["name"][0], f"{why}; what helps: num_workers=1, or a generator of its own")
    return batch


def _name(iterator: Any, place: str, why: str) -> None:
    """The batches of a loader are not shown to be the lost rank's."""
    where = place.rpartition("|")[2].rpartition("/")[2]
    kind = f"{type(iterator).__module__}.{type(iterator).__qualname__}"
    name = Reason("hidden-state", f"the loader of {where} ({kind}): {why}")
    if name not in _not_recorded and len(_not_recorded) < _MOST_EARLIER:
        _not_recorded.append(name)


def _meet_stranger(iterator: Any) -> dict[str, Any]:
    """An iterator that no `__iter__` that we know has made hands out its first batch."""
    place = location_key()
    _name(iterator, place, "how far it has read, and what its workers draw, is not recorded")
    return {"name": [place, 0]}


def not_proved() -> list[Reason]:
    """The loaders of the script whose batches a replacement may get otherwise."""
    return list(_not_recorded)


def _note_end(began: dict[str, Any]) -> None:
    """An iterator has ended: compute for how many steps the script still holds batches of it."""
    global _draining
    ahead, each = fetched_ahead(began["lead"], began["each"]), began["each"]
    _draining = max(_draining, 1 if ahead is None else -(-ahead // max(1, each)))


def wrap_next(original: Any) -> Any:
    """_BaseDataLoaderIter.__next__: note the newest batch, and the end."""

    def advance(self: Any) -> Any:
        unbegun = self.__dict__.pop("_ttprun_unbegun", None)
        if unbegun is not None:
            _note_first(self, *unbegun)
        session, began = current(), getattr(self, "_ttprun", None)
        try:
            batch = self._ttprun_batch = original(self)
        except workers.OtherBatchError as error:
            _refuse(error)
            raise
        except StopIteration:
            if not getattr(self, "_ttprun_ended", False) and hasattr(self, "_ttprun"):
                _note_end(self._ttprun)
            self._ttprun_ended = True
            self._ttprun_batch = None
            raise
        is_counted = threading.current_thread() is threading.main_thread() and not _is_making
        if session is not None and is_counted:
            if began is None:
                began = self._ttprun_stranger = getattr(self, "_ttprun_stranger", None) or _meet_stranger(self)
            costs = session.costs
            since = costs.now() if costs.is_on else 0
            workers.note_batch(session, str(began["name"]), batch)
            if since:
                costs.add(DATA, since)
        return batch

    return advance


def wrap_next_in_replay(original: Any) -> Any:
    """_BaseDataLoaderIter.__next__ in a replay: first return placeholders for used batches, if a loop drops them."""

    def advance(self: Any) -> Any:
        instead = self.__dict__.get("_ttprun_instead")
        if instead is None and "_ttprun_passed_over" in self.__dict__:
            instead = self._ttprun_instead = _instead_of_used_up(self, original)
        if instead is not None:
            for item in instead:
                return item
        return original(self)

    return advance


def _instead_of_used_up(iterator: Any, original: Any) -> Iterator[Any]:
    passed_over = iterator.__dict__.pop("_ttprun_passed_over")
    if placeholders.wanted():
        try:
            first = original(iterator)
        except StopIteration:
            return
        yield from placeholders.hand_out(first, passed_over)
        yield first


def wrap_reset(original: Any) -> Any:
    """_BaseDataLoaderIter._reset: with persistent workers the same iterator restarts."""

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        self._ttprun_ended = False
        before_first, Skipping.before_first = Skipping.before_first, None
        if before_first is not None:
            before_first()
        original(self, loader, first_iter)

    return reset
