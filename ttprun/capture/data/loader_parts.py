"""A DataLoader's parts (sampler, dataset, collate function) and batches.

The state that the parts had when an iterator was made (`held_by`): a sampler with its own generator, or a dataset that
counts its epochs. A replay that skips to a later epoch has not advanced them, so their state is recorded with the
iterator, and restored before the iterator is made again. Samplers are looked at whoever has written them: only torch's
own keep nothing but an epoch and a `torch.Generator`.

The fingerprints of batches (`fingerprints`): a replay must get the same data as the lost rank. A batch is the result of
the collate function: mostly tensors, in containers or in objects of the script's own classes.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ttprun.capture import values
from ttprun.capture.host import Host
from ttprun.capture.records.nodes import PARTS, AnyNode, FrozensetNode, Node, SetNode
from ttprun.capture.records.packing import SETTLED, unpack_as
from ttprun.capture.values import Snapshot, fingerprint, pack
from ttprun.capture.values.large import SMALL_BYTES, digest_of
from ttprun.capture.values.objects import is_of_user, restore_attributes
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import BATCH
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
    """Plain values and random generators; of a sampler also indices that it may shuffle in place."""
    if is_a(item, numpy.ndarray):
        return is_a(part, Sampler) and item.nbytes <= SMALL_BYTES
    return is_a(item, _HELD)


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
    node = Snapshot({}, is_separate=True).node(batch, 0)
    return [digest_of(memoryview(pack(_in_order(node))))]


def note_batch(session: Host, loader: str, batch: Any) -> None:
    """Note a batch that a DataLoader returns; a replacement compares it with the lost rank's.

    loader   by which it is distinguished from other DataLoaders, the same in every rank
    batch    a list, tuple or dict is noted by its items, all else as one; see `Training.note`

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
    if isinstance(node, dict):
        return {name: _in_order(item) for name, item in node.items()}
    if isinstance(node, list):
        return list(map(_in_order, node))
    if not isinstance(node, AnyNode):
        return node
    made = {name: _in_order(getattr(node, name)) for name in PARTS[type(node)]}
    if isinstance(node, SetNode | FrozensetNode):
        made["items"].sort(key=pack)
    return replace(node, **made)
