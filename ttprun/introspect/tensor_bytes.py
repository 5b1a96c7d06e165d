"""A tensor's elements as bytes, in place, to be hashed, recorded and sent; without the script's noticing (`Unseen`).

What is large and on a device is hashed there: see `content_of`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, ParamSpec, TypeVar

import numpy
import torch
import xxhash
from torch.utils import _python_dispatch as dispatch

from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.safe_reads import is_a

# Have torch report nothing of our own operations to the script.
#
# A subclass of Tensor, a mode (a counter of operations, a profiler of memory), a tracer and the grad mode of the
# script notice each operation on the thread that runs it. Ours are not the script's.

P = ParamSpec("P")
R = TypeVar("R")
_set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
_count_modes = torch._C._len_torch_dispatch_stack


class Unseen:
    """A context in which torch tells the script nothing; may be entered inside itself."""

    __slots__ = ("_functions", "_modes", "_trace")

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._modes: Any = None
        self._trace: Any = None
        if _count_modes():
            self._modes = dispatch._disable_current_modes()
            self._modes.__enter__()
        if torch._C._get_tracing_state() is not None:
            self._trace = torch._C._get_tracing_state()
            _set_trace(None)

    def __exit__(self, *raised: Any) -> None:
        if self._trace is not None:
            _set_trace(self._trace)
        if self._modes is not None:
            self._modes.__exit__(*raised)
        self._functions.__exit__(*raised)


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function's operations are unseen. It must not call code of the script's."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Unseen():
            return function(*args, **kwargs)

    return call


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous CPU tensor without conjugate or negative bit; itself if it is one."""
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


_TOGETHER_TO = 64 << 10  # bytes of a tensor
_DENSE = (torch.Tensor, torch.nn.Parameter)


def plain_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `plain` of those on a device, small ones in one go, since the CPU waits for each copy; others as they are."""
    results = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.is_cpu:
            continue
        if type(tensor) in _DENSE and 0 < tensor.nbytes <= _TOGETHER_TO:
            by_device.setdefault(tensor.device, []).append(at)
        else:
            results[at] = plain(tensor)
    for places in by_device.values():
        places.sort(key=lambda at: -tensors[at].itemsize)  # so that each begins at a multiple of its elements' size
        parts = [tensors[at].detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for at in places]
        copies = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
        for at, copy in zip(places, copies, strict=True):
            results[at] = copy.view(tensors[at].dtype).view(tensors[at].shape)
    return results


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a sparse one, the elements that it holds."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, and of a sparse one's indices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided tensor, in order; shares the memory of a contiguous CPU tensor.

    Without tensor.numpy(), after which torch does not allow the storage to be resized any more, as FSDP does.
    """
    flat = plain(tensor.detach()).contiguous()
    if not flat.numel():
        return memoryview(b"")
    buffer: Any = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    buffer.holds = flat
    array: Any = numpy.frombuffer(buffer, numpy.uint8)
    return memoryview(array)


FOLDED_FROM = _TOGETHER_TO  # bytes
_ROW = 8192  # words
_BLOCK = 64 * _ROW  # words that are multiplied at once: 4 MiB of products, as a script may leave little free
_WORDS = {1: torch.uint8, 2: torch.int16}  # by the bytes of an element; of longer ones their halves, and so on


def content_of(tensor: torch.Tensor) -> memoryview:
    """Bytes to hash instead of a strided tensor's elements: these, or for a large one on a device its `folded` rows.

    Two ranks that compare hashes have the tensor on devices of the same kind.
    """
    return bytes_of(tensor if tensor.is_cpu or tensor.nbytes < FOLDED_FROM else folded(tensor))


def folded(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of each row of _ROW words of a tensor, each word times an odd number of its own, modulo 2**64.

    tensor   any strided tensor; its elements are read in order
    returns  int64, on the same device

    Sums of integers are the same in any order. Two different rows have the same sum by a chance of 2**-32 at the most:
    that of multilinear hashing (Carter and Wegman). Nothing is kept on the device, whose memory may fail.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    factors = _factors().to(flat.device)
    sums = []
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK]
        rest = block.numel() % _ROW
        if whole := block.numel() - rest:
            sums.append((block[:whole].view(-1, _ROW) * factors).sum(1))  # in int64, as the factors are
        if rest:
            sums.append((block[whole:] * factors[:rest]).sum().view(1))
    return torch.cat(sums) if sums else words.to(torch.int64)


@cache
def _factors() -> torch.Tensor:
    """Odd numbers of 64 bits, the same everywhere (splitmix64)."""
    with numpy.errstate(over="ignore"):
        mixed = numpy.arange(1, _ROW + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(by)
    return torch.from_numpy((mixed | numpy.uint64(1)).view(numpy.int64))


def places(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Index in the sequence by the address of each tensor's storage, and of its first element.

    If tensors share a storage (parts of one flat buffer), its address maps to the first of them.

    tensors   any dtype, shape and device; of a DTensor the part that this rank holds counts
    """
    parts = list(map(local_of, tensors))
    indices: dict[int, int] = {}
    for at in ([part.untyped_storage().data_ptr() for part in parts], [part.data_ptr() for part in parts]):
        for index, address in enumerate(at):
            indices.setdefault(address, index)
    return indices


# Samples of tensors: a digest by which two processes compare them, and elements by which rounding is recognised.


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


def sampled_later(
    tensors: Sequence[torch.Tensor], salt: int
) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], tuple[int, bytes]]]:
    """As `sampled`, of tensors some of which are on a device, in two parts: the first does not wait for it.

    returns  what is read of them, each in memory of its own on its device; what makes `sampled`'s result of copies
             of these on the CPU
    """
    tensors = tensors[:_MOST_TENSORS]
    dtype, dtypes = tensors[0].dtype, [tensor.dtype for tensor in tensors]
    room = SAMPLE_BYTES // len(tensors) // _SAMPLED_BYTES * _SAMPLED_BYTES

    def finish(copies: list[torch.Tensor]) -> tuple[int, bytes]:
        state = xxhash.xxh3_64()
        sample = b""
        for copy, kind in zip(copies, dtypes, strict=True):
            part = bytes_of(copy)
            state.update(part)
            if kind == dtype:
                sample += _spread(part, room)
        return state.intdigest(), sample

    return [_part_to_sample(tensor, salt) for tensor in tensors], finish


def _part_to_sample(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """The bytes that are read of a tensor, as a new one on its device."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if len(flat) <= WHOLE_BYTES:
        return flat.clone()
    stride, at = _place_of_lines(len(flat), salt)
    return (
        flat[: LINES * stride].view(LINES, stride)[:, at : at + LINE_BYTES].clone(memory_format=torch.contiguous_format)
    )


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
    return bytes_of(flat.view(LINES, stride)[:, at : at + LINE_BYTES])


def _lines(view: Any, salt: int) -> bytes:
    """Lines spread over the whole view."""
    stride, at = _place_of_lines(len(view), salt)
    array: Any = numpy.frombuffer(view, numpy.uint8, LINES * stride).reshape(LINES, stride)
    lines: bytes = array[:, at : at + LINE_BYTES].tobytes()
    return lines


def comparable(values: Iterable[Any]) -> list[torch.Tensor]:
    """The dense tensors among some values."""
    return [
        value
        for value in values
        if (type(value) is torch.Tensor or is_a(value, torch.Tensor))
        and value.layout is torch.strided
        and not value.is_meta
    ]


def is_close(first: bytes, other: bytes, dtype: torch.dtype) -> bool:
    """Whether two samples differ by rounding alone, as sums of several threads do.

    first, other   bytes of the same elements of both tensors
    dtype          of both; only floating ones can be close
    """
    if not (dtype.is_floating_point and first) or len(first) != len(other) or len(first) % dtype.itemsize:
        return False
    here, there = (torch.frombuffer(bytearray(sample), dtype=dtype).double() for sample in (first, other))
    largest = max(here.abs().max().item(), there.abs().max().item())
    return bool(((here - there).abs() <= min(_ROUNDING * torch.finfo(dtype).eps, _MOST_ROUNDING) * largest).all())
