"""Capture and restore the states of the random generators that a script can draw from without naming one.

Those are Python's `random`, `numpy.random`'s global generator and torch's CPU generator, the latter two only if the
script has loaded them. torch is not imported here: loops are followed from the interpreter's start.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RngState = dict[str, Any]
_WORDS = struct.Struct(f"{len(random.getstate()[1])}I")  # of the Mersenne Twister


def capture() -> RngState:
    """The states, as plain values and bytes (about 10 KB)."""
    version, words, gauss = random.getstate()
    state: RngState = {"python": [version, _WORDS.pack(*words), gauss]}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        state["torch"] = torch.default_generator.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _pack_mersenne(numpy.random.get_state(legacy=False))
    return state


def restore(state: RngState) -> None:
    """Put captured states back. Raises RuntimeError if torch refuses its state's size."""
    version, words, gauss = state["python"]
    random.setstate((version, _WORDS.unpack(words), gauss))
    if "torch" in state:
        sys.modules["torch"].default_generator.set_state(tensor_from_bytes(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(unpack_mersenne(state["numpy"]))


def tensor_from_bytes(raw: bytes) -> torch.Tensor:
    """A uint8 tensor that owns a copy of `raw`."""
    torch: Any = sys.modules["torch"]
    found: Any = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return found  # type: ignore[no-any-return]


def _pack_mersenne(state: dict[str, Any]) -> list[Any]:
    inner = state["state"]
    return [
        state["bit_generator"],
        inner["key"].tobytes(),
        int(inner["pos"]),
        int(state["has_gauss"]),
        float(state["gauss"]),
    ]


def unpack_mersenne(packed: list[Any]) -> dict[str, Any]:
    """numpy's own form of a Mersenne Twister state."""
    numpy = sys.modules["numpy"]
    name, key, pos, has_gauss, gauss = packed
    return {
        "bit_generator": name,
        "state": {"key": numpy.frombuffer(key, dtype=numpy.uint32).copy(), "pos": pos},
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def pack_numpy_legacy(state: dict[str, Any]) -> list[Any]:
    """Plain form of `numpy.random.RandomState.get_state(legacy=False)`."""
    return _pack_mersenne(state)
