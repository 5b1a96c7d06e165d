"""Capture and restore the states of the random generators that a script can draw from without naming one.

Those are Python's `random`, `numpy.random`'s global generator and torch's CPU generator, the latter two only if the
script has loaded them. torch is not imported here: loops are followed from the interpreter's start.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from ctypes import c_char
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RngState = dict[str, Any]
_WORDS = struct.Struct(f"{len(random.getstate()[1])}I")  # of the Mersenne Twister


def state_of_python(generator: Any) -> list[Any]:
    """The state of a `random.Random`, or of the module, in our form."""
    version, words, gauss = generator.getstate()
    return [version, _WORDS.pack(*words), gauss]


def state_of_numpy(generator: Any) -> list[Any]:
    """The state of a `numpy.random.RandomState` in our form."""
    return _pack_mersenne(generator.get_state(legacy=False))


def _memory(at: int, size: int) -> Any:
    """Memory whose bytes now are `.raw` of what comes back."""
    return (c_char * size).from_address(at)


_instance: Any = random.getstate.__self__  # type: ignore[attr-defined]
_VERSION = random.Random.VERSION
# The C object: the index, then the words.
_index = _memory(id(_instance) + object.__basicsize__, 4)
_words = _memory(id(_instance) + object.__basicsize__ + 4, _WORDS.size - 4)
# `getstate` makes 625 integers that nobody needs: what stands in memory is had 25 times as fast.
_is_in_memory = [_VERSION, _words.raw + _index.raw, _instance.gauss_next] == state_of_python(random)


class _Numpy:
    """numpy's global generator, and its state when that was last asked for.

    generator, bits   another one in the place of either has its state elsewhere
    own, twister      the memory of what the generator itself holds, and of the twister
    seen..., packed   what stood there, and the state that it is
    """

    def __init__(self, generator: Any, bits: Any) -> None:
        self.generator = generator
        self.bits = bits
        head = object.__basicsize__
        self.own = _memory(id(generator) + head, type(generator).__basicsize__ - head)
        self.twister = _memory(bits.ctypes.state_address, _WORDS.size)
        self.seen = self.seen_twister = b""
        self.packed: list[Any] = []


_numpy: _Numpy | None = None


def _ask_numpy(numpy: Any) -> list[Any]:
    """numpy's global state. `get_state` is slow."""
    global _numpy
    generator = numpy.random.mtrand._rand
    bits = generator._bit_generator
    known = _numpy
    if known is None or known.generator is not generator or known.bits is not bits:
        if type(bits).__name__ != "MT19937":
            return _pack_mersenne(numpy.random.get_state(legacy=False))
        known = _numpy = _Numpy(generator, bits)
    known.packed = _pack_mersenne(numpy.random.get_state(legacy=False))
    known.seen, known.seen_twister = known.own.raw, known.twister.raw
    return known.packed


# In memory: the seed, two numbers and a flag, the words, and what is left of normal draws (a float and a double).
_ENGINE = struct.Struct("<Qi?xxxI624I")
_ENGINE_BYTES = (_ENGINE.size + 7) // 8 * 8 + 24
_WORDS_AT = _ENGINE.size - 4 * 624
_TOLD = struct.Struct("<Qiiq624Q")  # how torch tells the same


class _Torch:
    """torch's CPU generator, and its state when that was last asked for.

    memory         of its engine; None if it is not to be found
    seen, packed   what stood there, and the state that it is
    """

    def __init__(self, torch: Any) -> None:
        self.generator = torch.default_generator
        at = _engine_offset(torch)
        self.memory = _memory(self.generator._cdata + at, _ENGINE_BYTES) if at >= 0 else None
        self.seen = self.packed = b""


_torch: _Torch | None = None


def _ask_torch(torch: Any) -> bytes:
    """The state of torch's CPU generator."""
    global _torch
    known = _torch
    if known is None or known.generator is not torch.default_generator:
        known = _torch = _Torch(torch)
    known.packed = known.generator.get_state().numpy().tobytes()
    known.seen = known.memory.raw if known.memory is not None else b""
    return known.packed


def _engine_offset(torch: Any) -> int:
    """Where in a generator its engine lies; -1 if some draw does not show in the memory that is taken for it."""
    generator = torch.Generator().manual_seed(1 << 40)
    told = _TOLD.unpack_from(generator.get_state().numpy())
    at = _memory(generator._cdata, _ENGINE_BYTES).raw.find(struct.pack("<8I", *told[4:12])) - _WORDS_AT
    if at < 0 or _ENGINE.unpack_from(_memory(generator._cdata + at, _ENGINE.size)) != told:
        return -1
    memory = _memory(generator._cdata + at, _ENGINE_BYTES)
    seen = [memory.raw]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: torch.rand(1, generator=generator),
        lambda: torch.randn(1, generator=generator, dtype=torch.float64),
        lambda: torch.randn(1, generator=generator, dtype=torch.float64),  # the other half of the draw before
        lambda: generator.manual_seed(1 << 40 | 1),
    )
    for change in changes:
        change()
        seen.append(memory.raw)
    return at if len(set(seen)) == len(seen) else -1


def capture() -> RngState:
    """The states, as plain values and bytes (about 10 KB).

    torch and numpy are asked only if the memory that holds their state is not as it was.
    """
    words = [_VERSION, _words.raw + _index.raw, _instance.gauss_next] if _is_in_memory else state_of_python(random)
    state: RngState = {"python": words}
    modules = sys.modules
    torch: Any = modules.get("torch")
    if hasattr(torch, "default_generator"):
        of_torch = _torch
        state["torch"] = (
            of_torch.packed
            if of_torch is not None
            and of_torch.generator is torch.default_generator
            and of_torch.memory is not None
            and of_torch.memory.raw == of_torch.seen
            else _ask_torch(torch)
        )
    numpy: Any = modules.get("numpy")
    if numpy is not None:
        of_numpy = _numpy
        generator = numpy.random.mtrand._rand
        state["numpy"] = (
            of_numpy.packed
            if of_numpy is not None
            and of_numpy.generator is generator
            and of_numpy.bits is generator._bit_generator
            and of_numpy.twister.raw == of_numpy.seen_twister
            and of_numpy.own.raw == of_numpy.seen
            else _ask_numpy(numpy)
        )
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
