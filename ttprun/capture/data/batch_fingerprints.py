"""Fingerprints of a DataLoader's batches: a replay must get the same data as the lost rank.

A batch is the result of the collate function: mostly tensors, in containers or in objects of the script's own classes.
Begin with `fingerprints`.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from ttprun.capture.host import Host
from ttprun.capture.records.evidence import BATCH
from ttprun.capture.records.nodes import PARTS, AnyNode, FrozensetNode, SetNode
from ttprun.capture.values import Snapshot, fingerprint, pack
from ttprun.capture.values.large import digest_of
from ttprun.introspect.looks import is_a, values_of

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


def note(session: Host, loader: str, batch: Any) -> None:
    """Note a batch that a DataLoader returns; a replacement compares it with the lost rank's.

    loader   by which it is distinguished from other DataLoaders, the same in every rank
    batch    a list, tuple or dict is noted by its items, all else as one; see `Training.note`

    Raises MismatchError.
    """
    parts: Any = values_of(batch) if type(batch) is not list and is_a(batch, dict) else batch
    is_of_parts = type(parts) is list or is_a(parts, list | tuple)
    session.training.note(BATCH, loader, parts if is_of_parts else [parts])


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
