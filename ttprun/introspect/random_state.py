"""Capture and restore the global random generators: Python's `random`, `numpy.random`'s, torch's for CPU and devices.

All but the first only if the script has imported or used them. This file does not import torch: loops are followed
before it is.
"""

from __future__ import annotations

import random
import struct
import sys
from ctypes import c_char, string_at
from typing import TYPE_CHECKING, Any

from ttprun.device import accelerator

if TYPE_CHECKING:
    import torch

RngState = dict[str, Any]
_WORDS = struct.Struct(f"{len(random.getstate()[1])}I")  # of the Mersenne Twister


def state_of_python(generator: Any) -> list[Any]:
    """The state of a `random.Random`, or of the module, in our form."""
    version, words, gauss = generator.getstate()
    return [version, _WORDS.pack(*words), gauss]


def _memory(at: int, size: int) -> Any:
    """A view of memory; its `.raw` reads the bytes."""
    return (c_char * size).from_address(at)


_instance: Any = random.getstate.__self__  # type: ignore[attr-defined]
_VERSION = random.Random.VERSION
# The C object: the index, then the words.
_index = _memory(id(_instance) + object.__basicsize__, 4)
_words = _memory(id(_instance) + object.__basicsize__ + 4, _WORDS.size - 4)
# `getstate` makes 625 int objects: reading the memory is 25 times as fast.
_is_in_memory = [_VERSION, _words.raw + _index.raw, _instance.gauss_next] == state_of_python(random)


class _Numpy:
    """numpy's global generator, and its state when last asked: get_state takes 25 µs.

    generator, bits   known by identity: a replacement of either has its state elsewhere
    own, twister      memory of the generator's fields (a kept normal draw), and of its Mersenne Twister
    seen..., packed   the bytes there, and the state that they stand for
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
    """numpy's global state, in our form."""
    global _numpy
    generator = numpy.random.mtrand._rand
    bits = generator._bit_generator
    state = _numpy
    if state is None or state.generator is not generator or state.bits is not bits:
        if type(bits).__name__ != "MT19937":
            return pack_mersenne(numpy.random.get_state(legacy=False))
        state = _numpy = _Numpy(generator, bits)
    state.packed = pack_mersenne(numpy.random.get_state(legacy=False))
    state.seen, state.seen_twister = state.own.raw, state.twister.raw
    return state.packed


def _of_torch(generator: torch.Generator) -> bytes:
    """The state of a generator of torch's; numpy() would warn on the console while a model is traced."""
    state = generator.get_state()
    with sys.modules["torch"]._C.DisableTorchFunction():
        return string_at(state.data_ptr(), state.nbytes)


def capture() -> RngState:
    """The states, as plain values and bytes (about 10 KB); numpy is asked only if its memory has changed."""
    words = [_VERSION, _words.raw + _index.raw, _instance.gauss_next] if _is_in_memory else state_of_python(random)
    state: RngState = {"python": words}
    modules = sys.modules
    torch: Any = modules.get("torch")
    if hasattr(torch, "default_generator"):
        state["torch"] = _of_torch(torch.default_generator)
        of_devices = accelerator.random_states()
        if of_devices is not None:
            state["devices"] = list(of_devices)
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
    if "devices" in state:
        accelerator.restore_random_states(*state["devices"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(unpack_mersenne(state["numpy"]))


def tensor_from_bytes(raw: bytes) -> torch.Tensor:
    """A uint8 tensor that owns a copy of `raw`."""
    torch: Any = sys.modules["torch"]
    tensor: Any = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return tensor  # type: ignore[no-any-return]


def pack_mersenne(state: dict[str, Any]) -> list[Any]:
    """What `get_state(legacy=False)` of one of numpy's generators has returned, in our form."""
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
