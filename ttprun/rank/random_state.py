"""Capture and restore the states of the random generators that a script can draw from without naming one.

Those are Python's `random`, `numpy.random`'s global generator and torch's CPU generator, the latter two only if the
script has loaded them. torch is not imported here: loops are followed from the interpreter's start.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RngState = dict[str, Any]
_WORDS = struct.Struct(f"{len(random.getstate()[1])}I")  # of the Mersenne Twister


def _python_state() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, _WORDS.pack(*words), gauss]


_instance: Any = random.getstate.__self__  # type: ignore[attr-defined]
_MEMORY_AT = id(_instance) + object.__basicsize__  # the C object: the index, then the words


def _python_state_from_memory() -> list[Any]:
    """The same, 25 times as fast: `getstate` makes 625 integers that nobody needs."""
    raw = ctypes.string_at(_MEMORY_AT, _WORDS.size)
    return [random.Random.VERSION, raw[4:] + raw[:4], _instance.gauss_next]


_read_python = _python_state_from_memory if _python_state_from_memory() == _python_state() else _python_state


_numpy_seen: tuple[bytes, list[Any]] = (b"", [])


def _numpy_state(numpy: Any) -> list[Any]:
    """numpy's global state. `get_state` is slow, and only asked if the memory that holds the state is not as it was."""
    global _numpy_seen
    generator = numpy.random.mtrand._rand
    bits = generator._bit_generator
    memory = ctypes.string_at(id(generator), type(generator).__basicsize__)[object.__basicsize__ :]
    if type(bits).__name__ == "MT19937":
        memory += ctypes.string_at(bits.ctypes.state_address, _WORDS.size)
        if memory == _numpy_seen[0]:
            return _numpy_seen[1]
    packed = _pack_mersenne(numpy.random.get_state(legacy=False))
    _numpy_seen = (memory, packed)
    return packed


def capture() -> RngState:
    """The states, as plain values and bytes (about 10 KB)."""
    state: RngState = {"python": _read_python()}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        state["torch"] = torch.default_generator.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_state(numpy)
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
