"""Tensors as a safetensors file, in one pass over their own memory.

The library copies everything first (before 0.8), refuses tensors that share memory, and cannot hash what it writes; the
format is a header and the elements, so we write it ourselves and read it with the library.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ttprun.state.chunks import Chunk

# Codes of the format -> torch's name; some are not in every torch.
_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
CODES = {getattr(torch, name): code for code, name in _CODES.items() if hasattr(torch, name)}
_METADATA_KEY = "__metadata__"
_ALIGNMENT_BYTES = 8
# Under this name torch.distributed.checkpoint writes into a header where its tensors lie in larger ones.
SHARDING_KEY = "DCP_SHARDING_INFO"


def torch_dtype(code: str) -> torch.dtype:
    """The type that a code of the format stands for. Raises KeyError if this torch has none."""
    dtype: torch.dtype = getattr(torch, _CODES[code])
    return dtype


def can_hold(tensor: Tensor) -> bool:
    """Whether the format knows such a tensor: dense, and of one of its types (complex128 is not)."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.dtype in CODES


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the content of a safetensors file, for `write_file`: the header, then each tensor's elements.

    Arguments and errors are those of `lay_out`. One that is not contiguous, or not on the CPU, is copied when its turn
    comes; the others are read where they are.
    """
    return chunks(*lay_out(tensors, metadata))


def metadata_of(tensors: Mapping[str, Tensor], chunks: Mapping[str, Chunk]) -> dict[str, str]:
    """Texts for the header of a file with parts of larger tensors, as torch.distributed.checkpoint writes them.

    tensors  all of the file
    chunks   key -> which part of the whole it is; empty: there are only whole ones, and nothing needs to be said
    """
    if not chunks:
        return {}
    slices = {}
    for key, tensor in tensors.items():
        chunk = chunks.get(key) or Chunk(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
        slices[key] = {"saved_offsets": list(chunk.offsets), "shape": list(chunk.shape)}
    return {SHARDING_KEY: json.dumps(slices)}


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[Tensor]]:
    """What a safetensors file consists of: its header, and the tensors in the order of their elements.

    tensors   any shape, stride and device; tensors that share memory are written each for itself
    metadata  texts for the header

    Raises ValueError if the format cannot hold one of them (see `can_hold`).
    """
    # Wide elements first, as the library does: then each tensor is aligned to its element.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for key, tensor in ordered:
        if not can_hold(tensor):
            raise ValueError(f"'{key}' is {tensor.layout} of {tensor.dtype}, which safetensors cannot hold")
        if key == _METADATA_KEY:
            raise ValueError(f"no tensor of a safetensors file can be named '{key}'")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def chunks(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    """The content of what `lay_out` has laid out.

    header    the file's first bytes
    tensors   in this order; each is copied to the CPU when its turn comes, unless it is there and contiguous
    """
    yield memoryview(header)
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.numel():
            elements: Any = flat.view(torch.uint8).numpy()
            yield memoryview(elements)
