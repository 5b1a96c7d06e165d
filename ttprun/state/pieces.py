"""What files of tensors hold of each tensor: all of it, or a part that one rank had. Only headers are read for that."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from safetensors import safe_open
from torch import Tensor

from ttprun.state.tensor_file import SHARDING_KEY, torch_dtype


class CannotReshardError(Exception):
    """The files do not hold what is wanted; the message says what."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: all of a tensor, or a part of it.

    shape    of the whole
    offsets  of its first element there
    sizes    its own shape
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.sizes == self.shape

    def is_same_part(self, other: Piece) -> bool:
        """Whether two files hold the same part of a tensor."""
        return self.offsets == other.offsets and self.sizes == other.sizes


def pieces_in(path: str) -> dict[str, Piece]:
    """Key -> what a file of tensors holds of it. Raises CannotReshardError, OSError."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:
            raise CannotReshardError(f"'{path}' is not a file of tensors")
        raw = file.read(size)
    try:
        header = json.loads(raw)
        slices = json.loads(header.pop("__metadata__", {}).get(SHARDING_KEY, "{}"))
        pieces = {}
        for key, entry in header.items():
            sizes = tuple(entry["shape"])
            place = slices.get(key, {"saved_offsets": [0] * len(sizes), "shape": list(sizes)})
            offsets, shape = tuple(place["saved_offsets"]), tuple(place["shape"])
            pieces[key] = Piece(path, torch_dtype(entry["dtype"]), shape, offsets, sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotReshardError(f"the header of '{path}' cannot be read ({error!r})") from None
    return pieces


def pieces_of(paths: Sequence[str]) -> dict[str, list[Piece]]:
    """Key -> what all files hold of it, each part once: ranks that held the same part have written it each for itself.

    Raises CannotReshardError, OSError.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in paths:
        for key, piece in pieces_in(path).items():
            parts = pieces.setdefault(key, [])
            if not any(map(piece.is_same_part, parts)):
                parts.append(piece)
    return pieces


def assemble(key: str, pieces: Sequence[Piece]) -> Tensor:
    """A whole tensor, on the CPU. Raises CannotReshardError if a part of it is in no file, and OSError.

    key      of the tensor in the files
    pieces   of one tensor; several may be the same part
    returns  of its dtype and shape
    """
    if not pieces:
        raise CannotReshardError(f"{key} is in none of the files")
    first, parts = pieces[0], [piece for i, piece in enumerate(pieces) if not any(map(piece.is_same_part, pieces[:i]))]
    if first.is_whole:
        return _read(key, first)
    there = sum(prod(part.sizes) for part in parts)
    if there != prod(first.shape):
        raise CannotReshardError(f"of {key} {there} of {prod(first.shape)} elements are there")
    whole = torch.empty(first.shape, dtype=first.dtype)
    for piece in parts:
        ranges = zip(piece.offsets, piece.sizes, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ranges)] = _read(key, piece)
    return whole


def _read(key: str, piece: Piece) -> Tensor:
    with safe_open(piece.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor
