"""Samples of tensors: a digest by which two processes compare them, and elements by which rounding is recognised.

Begin with `sampled`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
import xxhash

from ttprun.introspect.looks import is_a
from ttprun.introspect.tensor_bytes import bytes_of

SAMPLE_BYTES = 512


WHOLE_BYTES = 64 << 10  # a tensor up to this size is hashed whole; of a larger one, LINES lines


LINES = 64


LINE_BYTES = 64  # a cache line


_WORD_BYTES = 16  # the longest element; lines and their starts are multiples of it


_SAMPLED_BYTES = 8  # whole elements of each floating dtype


_ROUNDING = 4096  # units in the last place of the largest element


_MOST_ROUNDING = 0.05  # of the largest element


_MOST_TENSORS = 32  # of a batch, a loss or a collective


def sampled(tensors: Sequence[torch.Tensor], salt: int) -> tuple[int, bytes]:
    """(digest of the tensors, or of parts of large ones; bytes of some elements of those of the first one's dtype).

    tensors   dense, any dtype, shape and device; those after the first _MOST_TENSORS are left out
    salt      selects the parts: others in each step, the same in each process
    """
    state = xxhash.xxh3_64()
    sample = b""
    room = SAMPLE_BYTES // min(len(tensors), _MOST_TENSORS) // _SAMPLED_BYTES * _SAMPLED_BYTES if tensors else 0
    for tensor in tensors[:_MOST_TENSORS]:
        if tensor.is_cpu or tensor.nbytes <= WHOLE_BYTES or not tensor.is_contiguous():
            view = _memory(tensor)
            part = view if len(view) <= WHOLE_BYTES else _lines(view, salt)
        else:
            part = _lines_on_device(tensor, salt)
        state.update(part)
        if tensor.dtype == tensors[0].dtype:
            sample += _spread(part, room)
    return state.intdigest(), sample


def _spread(part: Any, room: int) -> bytes:
    """At most `room` bytes of whole elements, from all of it."""
    if len(part) <= room:
        return bytes(part)
    words = numpy.frombuffer(part, numpy.uint64, len(part) // _SAMPLED_BYTES)
    return words[:: -(-len(words) * _SAMPLED_BYTES // room)].tobytes()


def _memory(tensor: torch.Tensor) -> Any:
    """As `bytes_of`, quicker; only valid while the tensor lives."""
    if tensor.is_cpu and tensor.nbytes and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return bytes_of(tensor)


def _place_of_lines(size: int, salt: int) -> tuple[int, int]:
    """(bytes from one line to the next, where each begins)."""
    stride = size // LINES // _WORD_BYTES * _WORD_BYTES
    return stride, salt * LINE_BYTES % (stride - LINE_BYTES + 1) // _WORD_BYTES * _WORD_BYTES


def _lines_on_device(tensor: torch.Tensor, salt: int) -> memoryview:
    """As `_lines`, of which alone are copied to the CPU."""
    stride, at = _place_of_lines(tensor.nbytes, salt)
    flat = tensor.detach().view(-1).view(torch.uint8)[: LINES * stride]
    return _in_order(numpy.frombuffer(bytes_of(flat.view(LINES, stride)[:, at : at + LINE_BYTES]), numpy.uint8))


def _lines(view: Any, salt: int) -> memoryview:
    """Lines spread over the whole view, the first words of each before the rest."""
    stride, at = _place_of_lines(len(view), salt)
    array: Any = numpy.frombuffer(view, numpy.uint8, LINES * stride).reshape(LINES, stride)
    return _in_order(array[:, at : at + LINE_BYTES])


def _in_order(lines: Any) -> memoryview:
    lines = lines.reshape(LINES, LINE_BYTES)
    words = SAMPLE_BYTES // LINES
    return memoryview(lines[:, :words].tobytes() + lines[:, words:].tobytes())


def comparable(values: Iterable[Any]) -> list[torch.Tensor]:
    """The dense tensors among some values."""
    return [one for one in values if is_a(one, torch.Tensor) and one.layout is torch.strided and not one.is_meta]


def is_close(one: bytes, other: bytes, dtype: torch.dtype) -> bool:
    """Whether two samples differ by rounding alone, as sums of several threads do.

    one, other   bytes of the same elements of both tensors
    dtype        of both; only floating ones can be close
    """
    if not (dtype.is_floating_point and one) or len(one) != len(other) or len(one) % dtype.itemsize:
        return False
    here, there = (torch.frombuffer(bytearray(sample), dtype=dtype).double() for sample in (one, other))
    largest = max(here.abs().max().item(), there.abs().max().item())
    return bool(((here - there).abs() <= min(_ROUNDING * torch.finfo(dtype).eps, _MOST_ROUNDING) * largest).all())
