"""The share of a checkpoint that a lost rank cannot write any more: another rank writes it, from its mirror.

Only what no living rank holds is in it. Begin with `write`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from ttprun.introspect import fail_open
from ttprun.protocol.snapshots import MirroredShare, Share
from ttprun.state.chunks import Chunk
from ttprun.state.files import write_file
from ttprun.state.tensor_file import chunks, lay_out, metadata_of
from ttprun.tensors.checkpoint_shards import Differing, version_of
from ttprun.tensors.mirror_slots import Stored
from ttprun.tensors.replicated import parameter_of


class _Part(NamedTuple):
    """One tensor of the mirror.

    chunk   which part of the whole it is; None: all of it
    """

    key: str
    tensor: torch.Tensor
    chunk: Chunk | None


def write(order: MirroredShare, owners: Mapping[str, Sequence[int]], writers: Sequence[int]) -> Share:
    """Write what a lost rank alone held to a new file of a checkpoint.

    owners    as in `Differing`
    writers   ranks that write shares of their own

    Raises NotRepairableError, OSError, ValueError.
    """
    stored = Stored(order.slot)
    differing = Differing(owners, order.rank, (*writers, order.rank))
    mine: dict[str, torch.Tensor] = {}
    chunks_of: dict[str, Chunk] = {}
    for key, tensor, chunk in _parts(stored):
        if chunk is not None and tensor.numel():
            mine[key], chunks_of[key] = tensor, chunk
        elif chunk is None and differing.holds(key) and _holds_alone(differing, key, writers):
            mine[differing.stored(key)] = tensor
    try:
        header, tensors = lay_out(mine, {"format": "pt"} | metadata_of(mine, chunks_of))
    except ValueError as error:
        raise fail_open.NotRepairableError(str(error)) from None
    Path(order.path).unlink(missing_ok=True)
    entry = write_file(Path(order.path), chunks(header, tensors))
    common = [one for key, one in zip(stored.parameters, stored.header, strict=True) if key not in owners]
    return Share(
        order.share,
        bytes=entry.bytes,
        xxh3=entry.xxh3,
        header_xxh3=xxhash.xxh3_64_hexdigest(json.dumps(common).encode()),
        digests={},
        differing=version_of(owners),
        header=stored.header if owners else [],
    )


def _holds_alone(differing: Differing, key: str, writers: Sequence[int]) -> bool:
    owners = differing.owners[parameter_of(key)]
    return all(owners[rank] != owners[differing.rank] for rank in writers)


def _parts(stored: Stored) -> list[_Part]:
    """The tensors of a mirror, in the order of `replicated.describe`."""
    found = []
    for key, offset, (dtype, shape, chunk) in zip(stored.keys, stored.state, stored.forms, strict=True):
        like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        box = None if chunk is None else Chunk(*map(tuple, chunk))
        found.append(_Part(key, stored.tensor(like, offset), box))
    return found
