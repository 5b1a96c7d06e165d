"""A DataLoader's parts (sampler, dataset, collate function), batches, and workers.

The state that the parts had when an iterator was made (`held_by`): a sampler with its own generator, or a dataset that
counts its epochs. A replay that skips to a later epoch has not advanced them, so their state is recorded with the
iterator, and restored before the iterator is made again. Samplers are looked at whoever has written them: only torch's
own keep nothing but an epoch and a `torch.Generator`.

The fingerprints of batches (`fingerprints`): a replay must get the same data as the lost rank. A batch is the result of
the collate function: mostly tensors, in containers or in objects of the script's own classes.

A worker draws from its own generators, batch after batch, ahead of the training. Before it hands one over, it writes
its states, and a digest of the batch, to a ring in the rank's recorder, which outlives both. A replacement's worker
that begins at batch k restores the states with which the lost one was to begin it, also if it had not begun it yet;
what it then makes is compared with what the lost one had prepared. Workers are followed where they make what fetches
batches, whatever their main function is. One that is not forked from the rank (spawn, forkserver) is given the recorder
with its main function, whose pickled form is ours (`_Loop`).
"""

from __future__ import annotations

import functools
import random
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import reduction
from typing import Any

import msgpack
import msgspec
import numpy
import torch
import xxhash
from msgspec.structs import replace
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ttprun.capture import values
from ttprun.capture.records.nodes import AnyNode, FrozensetNode, Node, SetNode
from ttprun.capture.records.packing import SETTLED, unpack_as
from ttprun.capture.records.recorder import WORKER_BATCHES, Recorder
from ttprun.capture.values import Snapshot, fingerprint, pack
from ttprun.capture.values.large import SMALL_BYTES, digest_of
from ttprun.capture.values.objects import is_of_user, restore_attributes
from ttprun.capture.values.trees import parts_anew
from ttprun.introspect import children, random_state
from ttprun.introspect.current_rank import BATCH, Rank, current
from ttprun.introspect.safe_reads import attributes_of, is_a, values_of
from ttprun.introspect.tensor_bytes import unseen

# Types of the attributes that are recorded: small values that change between epochs.
_HELD: tuple[Any, ...] = (
    *SETTLED,
    bytes,
    torch.Generator,
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
)
_MOST_ITEMS = 100_000  # of a container that a sampler keeps: it is packed once an epoch
_any_node: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Node)
_held_by_parts: msgspec.msgpack.Decoder[list[dict[str, Node]]] = msgspec.msgpack.Decoder(list[dict[str, Node]])


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The sampler, the batch sampler, and the samplers inside them."""
    distinct: list[Any] = []
    waiting = list(map(attributes_of(loader).get, ("sampler", "batch_sampler")))
    while waiting:
        sampler = waiting.pop(0)
        if is_a(sampler, Sampler) and all(sampler is not other for other in distinct):
            distinct.append(sampler)
            waiting[:0] = _samplers_in(sampler)
    return distinct


def _samplers_in(sampler: Any) -> list[Any]:
    """Those that a sampler holds; a DistributedSampler that shares out another's indices has it in its "dataset"."""
    parts = list(attributes_of(sampler).values())
    if is_a(sampler, DistributedSampler):
        parts += attributes_of(attributes_of(sampler).get("dataset")).values()
    return [item for item in parts if is_a(item, Sampler)]


def generators(loader: DataLoader[Any]) -> list[Any]:
    """The torch.Generators of a loader and its samplers; `held_by` records other kinds."""
    distinct: list[Any] = []
    for part in (loader, *samplers(loader)):
        generator = attributes_of(part).get("generator")
        if is_a(generator, torch.Generator) and all(generator is not other for other in distinct):
            distinct.append(generator)
    return distinct


def held_by(loader: DataLoader[Any]) -> bytes:
    """What samplers, and other parts of the user's own classes, hold that changes between epochs; b"" if nothing."""
    snapshot = values.Snapshot({}, is_separate=True)
    nodes = [
        {name: snapshot.node(item, 0) for name, item in attributes_of(part).items() if _is_held(part, item)}
        for part in _parts(loader)
    ]
    return values.pack(nodes) if any(nodes) else b""


def _is_held(part: Any, item: Any) -> bool:
    """Plain values and random generators; of a sampler also what it may count, weigh or shuffle in place."""
    if is_a(item, numpy.ndarray):
        return is_a(part, Sampler) and item.nbytes <= SMALL_BYTES
    return is_a(item, _HELD) or (is_a(part, Sampler) and type(item) in (list, dict) and len(item) <= _MOST_ITEMS)


def hold_again(loader: DataLoader[Any], packed: bytes) -> None:
    """Restore what `held_by` has returned."""
    if not packed:
        return
    restore = values.Restore([], is_comparing=False)
    recorded = unpack_as(_held_by_parts, packed)
    for part, nodes in zip(_parts(loader), recorded, strict=False):
        restore_attributes(restore, part, nodes, type(part).__qualname__, keep=None)


def resumed_from(loader: DataLoader[Any]) -> bytes:
    """The state that torchdata's StatefulDataLoader is about to resume from; b"" of any other loader."""
    given = attributes_of(loader)
    if "next_iter_state" not in given:
        return b""
    return values.pack(values.Snapshot({}, is_separate=True).node(given["next_iter_state"], 0))


def resume_again(loader: DataLoader[Any], packed: bytes) -> bool:
    """Have it resume from what `resumed_from` has returned; returns whether it is a StatefulDataLoader.

    Its `state_dict` says what its sampler and its dataset have given: these have to give it once more in a replay.
    """
    if packed:
        restore = values.Restore([], is_comparing=False)
        loader.next_iter_state = restore.value(None, unpack_as(_any_node, packed), "next_iter_state")
    return bool(packed)


def _parts(loader: DataLoader[Any]) -> list[Any]:
    """Each sampler but torch's own, and each other part of a class of the user's; in the same order in each run."""
    named = map(attributes_of(loader).get, ("sampler", "batch_sampler", "dataset", "collate_fn"))
    given = (*samplers(loader), *named)
    return list({id(part): part for part in given if _is_looked_at(part)}.values())


def _is_looked_at(part: Any) -> bool:
    kind = type(part)
    return is_of_user(kind) or (is_a(part, Sampler) and not kind.__module__.startswith("torch."))


@unseen
def state_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What an iterator's order depends on, as it is now."""
    return {
        "rng": random_state.capture(),
        "epochs": [attributes_of(sampler).get("epoch") for sampler in samplers(loader)],
        "generators": [generator.get_state().numpy().tobytes() for generator in generators(loader)],
        "held": held_by(loader),
    }


def put_back(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Have it depend on the same again."""
    for sampler, epoch in zip(samplers(loader), state["epochs"], strict=False):
        if epoch is not None and "epoch" in attributes_of(sampler):
            sampler.epoch = epoch
    hold_again(loader, state["held"])
    set_random_states(loader, state)


def set_random_states(loader: DataLoader[Any], recorded: dict[str, Any]) -> None:
    """Have its generators, and the process's own, draw as they did then."""
    for generator, state in zip(generators(loader), recorded["generators"], strict=False):
        generator.set_state(random_state.tensor_from_bytes(state))
    random_state.restore(recorded["rng"])


_MOST_PARTS = 8  # of a batch have fingerprints


def fingerprints(batch: Any) -> list[bytes]:
    """Hashes of a batch: one of each tensor, and one of each other part; [] for None."""
    if batch is None:
        return []
    parts: Any = values_of(batch) if type(batch) is not list and is_a(batch, dict) else batch
    if type(parts) is list or is_a(parts, list | tuple):
        hashes = []
        for part in parts[:_MOST_PARTS]:
            if (type(part) is torch.Tensor or is_a(part, torch.Tensor)) and part.layout is torch.strided:
                hashes.append(fingerprint(part))
            else:
                hashes += fingerprints(part)
        return hashes
    if is_a(batch, torch.Tensor) and batch.layout is torch.strided:
        return [fingerprint(batch)]
    return [digest_of(memoryview(pack(_in_order(Snapshot({}, is_separate=True).node(batch, 0)))))]


def note_batch(session: Rank, loader: str, batch: Any) -> None:
    """Note a batch that a DataLoader returns; a replacement compares it with the lost rank's.

    loader   by which it is distinguished from other DataLoaders, the same in every rank
    batch    a list, tuple or dict is noted by its items, all else as one; see `Observers.note`

    Raises MismatchError.
    """
    parts: Any = values_of(batch) if type(batch) is not list and is_a(batch, dict) else batch
    is_of_parts = type(parts) is list or is_a(parts, list | tuple)
    session.observers.note(BATCH, loader, parts if is_of_parts else [parts])


def is_of_tensors(batch: Any) -> bool:
    """Whether the fingerprints of a batch cover all of it, and each is a tensor's."""
    if type(batch) is torch.Tensor:
        return batch.layout is torch.strided
    if is_a(batch, dict):
        batch = values_of(batch)
    if is_a(batch, list | tuple):
        return 0 < len(batch) <= _MOST_PARTS and all(map(is_of_tensors, batch))
    return is_a(batch, torch.Tensor) and batch.layout is torch.strided


def _in_order(node: Any) -> Any:
    """The node, or a part of one, with the items of sets sorted: their iteration order differs between processes."""
    if not isinstance(node, AnyNode):
        return node
    made = parts_anew(node, int, lambda inner, _: _in_order(inner))
    if isinstance(node, SetNode | FrozensetNode):
        made["items"].sort(key=pack)
    return replace(node, **made)


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

    try:
        return xxhash.xxh3_64_intdigest(b"".join(fingerprints(batch)))
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
