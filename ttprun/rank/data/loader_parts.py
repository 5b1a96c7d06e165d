"""A DataLoader's parts (sampler, dataset, collate function), and their state when an iterator was made.

E.g. a sampler with its own generator, or a dataset that counts its epochs. A replay that skips to a later epoch has not
advanced them, so their state is recorded with the iterator, and restored before the iterator is made again. Begin with
`held_by`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler

from ttprun.rank import values
from ttprun.rank.process.looks import attributes_of, is_a
from ttprun.rank.values.nodes import SETTLED
from ttprun.rank.values.objects import is_of_user, restore_attributes

# Types of the attributes that are recorded: small values that change between epochs.
_HELD: tuple[Any, ...] = (*SETTLED, torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The sampler, the batch sampler, and the samplers inside them."""
    found: list[Any] = []
    held = attributes_of(loader)
    for sampler in (held.get("sampler"), held.get("batch_sampler")):
        while is_a(sampler, Sampler) and all(sampler is not known for known in found):
            found.append(sampler)
            sampler = attributes_of(sampler).get("sampler")
    return found


def generators(loader: DataLoader[Any]) -> list[Any]:
    """The torch.Generators of a loader and its samplers; `held_by` records other kinds."""
    found: list[Any] = []
    for part in (loader, *samplers(loader)):
        generator = attributes_of(part).get("generator")
        if is_a(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def held_by(loader: DataLoader[Any]) -> bytes:
    """The plain values and random generators in parts of the user's own classes, packed; b"" if there are none."""
    snapshot = values.Snapshot({}, is_apart=True)
    found = [
        {name: snapshot.node(item, 0) for name, item in attributes_of(part).items() if is_a(item, _HELD)}
        for part in _parts_of_user(loader)
    ]
    return values.pack(found) if any(found) else b""


def hold_again(loader: DataLoader[Any], held: bytes) -> None:
    """Restore what `held_by` has returned."""
    if not held:
        return
    restore = values.Restore([], is_comparing=False)
    for part, nodes in zip(_parts_of_user(loader), values.unpack(held), strict=False):
        restore_attributes(restore, part, nodes, type(part).__qualname__, keep=None)


def _parts_of_user(loader: DataLoader[Any]) -> list[Any]:
    """Each part of a class of the user's once, in the same order in each run."""
    named = map(attributes_of(loader).get, ("sampler", "batch_sampler", "dataset", "collate_fn"))
    given = (*samplers(loader), *named)
    return list({id(part): part for part in given if is_of_user(type(part))}.values())
