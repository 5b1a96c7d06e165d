"""What a DataLoader is made of, and what its parts held when an iterator was made.

A sampler that shuffles with a generator of its own, a dataset that counts its epochs: an iterator begins with what they
hold at that moment. A replay that goes straight to a later epoch has not brought them there, so it is recorded with the
iterator, and put back before the iterator is made again. Begin with `held_by`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler

from ttprun.rank import values
from ttprun.rank.values.nodes import SETTLED
from ttprun.rank.values.objects import attributes_of, is_of_user, restore_attributes

# Of the parts of the user's, such attributes: what moves from one epoch to the next, and is small.
_HELD: tuple[Any, ...] = (*SETTLED, torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The sampler, and those that it takes from."""
    found: list[Any] = []
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        while isinstance(sampler, Sampler) and all(sampler is not known for known in found):
            found.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    return found


def generators(loader: DataLoader[Any]) -> list[Any]:
    """The torch.Generators by which a loader and its samplers shuffle; of other kinds `held_by` tells."""
    found: list[Any] = []
    for generator in (loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers(loader))):
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def held_by(loader: DataLoader[Any]) -> bytes:
    """The numbers, texts and random generators that parts of the user's own classes hold; b"" if there are none."""
    snapshot = values.Snapshot({}, is_apart=True)
    found = [
        {name: snapshot.node(item, 0) for name, item in attributes_of(part).items() if isinstance(item, _HELD)}
        for part in _parts_of_user(loader)
    ]
    return values.pack(found) if any(found) else b""


def hold_again(loader: DataLoader[Any], held: bytes) -> None:
    """Put it back."""
    if not held:
        return
    restore = values.Restore([], is_comparing=False)
    for part, nodes in zip(_parts_of_user(loader), values.unpack(held), strict=False):
        restore_attributes(restore, part, nodes, type(part).__qualname__, keep=None)


def _parts_of_user(loader: DataLoader[Any]) -> list[Any]:
    """In an order that is the same whenever the script is run; each once."""
    named = (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset", "collate_fn"))
    given = (*samplers(loader), *named)
    return list({id(part): part for part in given if is_of_user(type(part))}.values())
