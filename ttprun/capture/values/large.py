"""Tensors and arrays too large to be recorded each time: the replay makes them again, and they are compared.

A large tensor is hashed when it is first met (above TENSOR_BYTES only blocks spread over it, since batches are new at
each step). The hash is valid as long as it is the same tensor, at the same address, with the same version counter. An
array has no version counter: it is hashed at each boundary, and so is a tensor that a graph of its device may write.
One that has changed since the previous boundary is not data that a replay would load again: it is copied into the
record. `first` of a changed one is the number of the first one that begins at the same address. A dtype of numpy begins
with its byte order or a bracket, one of torch with a letter.

Writes through `.data` or `.numpy()` are not counted, and a large array cannot be hashed at each step. So what has been
the same at some boundaries is looked at in turns: at each boundary TURN_BYTES of all such memory are hashed, and
compared (of an array beyond WHOLE_BYTES a part of its blocks). Begin with `follow`.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from typing import Any

import numpy
import torch
import xxhash

from ttprun.capture.records.nodes import ChangedDataNode, DataNode, Number
from ttprun.capture.records.packing import MISSING
from ttprun.capture.values.autograd_graphs import forget_gradient
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.plain import dtype_of, dtype_text
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.device import accelerator
from ttprun.introspect.safe_reads import is_a
from ttprun.introspect.tensor_bytes import bytes_of, plain

SMALL_BYTES = 64 << 10  # up to here all elements are recorded
WHOLE_BYTES = 64 << 20  # up to here all bytes are hashed; of more, blocks that are spread over the whole
TENSOR_BYTES = 1 << 20  # the same for tensors, whose writes are counted: batches are hashed at each step
TURN_BYTES = 1 << 20  # that are hashed at a boundary, of all that has been the same at _LOOKS boundaries
_BLOCKS = 8192
_TENSOR_BLOCKS = 2048
_BLOCK_BYTES = 256
_PROBES = 64
_SHARES = 16  # of the blocks of an array beyond WHOLE_BYTES: each is as long to read as TURN_BYTES in a row
_LOOKS = 3
_UNKNOWN = -2  # no version: what was found to be written is hashed at the next look


class _Met:
    """What is known about one tensor or array, as of the newest boundary.

    looks   boundaries at which all of it was unchanged
    probe   elements spread over a tensor, which are compared at each boundary
    parts   hashes of its parts, each of TURN_BYTES, while it is looked at in turns; empty before
    seen    the boundaries at which these were looked at
    asked   the newest boundary at which it was met
    """

    __slots__ = (
        *("asked", "at", "digest", "end", "is_changing", "looks", "looked", "parts", "probe", "reference", "seen"),
        *("values", "version"),
    )

    def __init__(self) -> None:
        self.at = self.end = self.version = self.looked = -1
        self.asked = self.looks = 0
        self.digest = self.values = b""
        self.is_changing = False
        self.parts: list[bytes] = []
        self.seen: list[int] = []
        self.probe: Any = None
        self.reference: Any = None

    def read_probe(self) -> bytes:
        """The sampled elements; only valid while its address is known."""
        sample: bytes = self.probe.tobytes() if self.probe is not None else b""
        return sample

    def is_as_it_was(self, at: int, size: int, version: int) -> bool:
        """Whether it is known to be unwritten, as far as a boundary has time to look."""
        is_in_turns = bool(self.parts) and not Clock.is_whole
        if (version < 0 and not is_in_turns) or (self.at, self.end, self.version) != (at, at + size, version):
            return False
        return self.values == self.read_probe()

    def note_same(self, value: Any) -> None:
        """All of it was unchanged; after some such boundaries it is hashed once more, and its turns begin."""
        if self.looked != Clock.boundary:
            self.looked = Clock.boundary
            self.looks += 1
        if self.looks >= _LOOKS and not self.parts and not self.is_changing:
            if is_a(value, torch.Tensor) and fingerprint_of_all(value) != self.digest:
                self.is_changing, self.version = True, _UNKNOWN
                return
            size = self.end - self.at
            parts = -(-size // TURN_BYTES) if size <= WHOLE_BYTES else _SHARES
            self.parts = list(map(self.part, range(parts)))
            self.seen = [Clock.boundary] * len(self.parts)
            _turns.extend((self, self.parts, which) for which in range(len(self.parts)))

    def part(self, which: int) -> bytes:
        """The hash of one part."""
        size = self.end - self.at
        if size <= WHOLE_BYTES:
            begin = which * TURN_BYTES
            return xxhash.xxh3_64_digest(_memory(self.at + begin, min(TURN_BYTES, size - begin)))
        blocks = _blocks(numpy.frombuffer(_memory(self.at, size), numpy.uint8), _BLOCKS)
        return xxhash.xxh3_64_digest(blocks[which::_SHARES].tobytes())

    def look(self, which: int) -> None:
        """Look at one part, whose turn it is: what was written is hashed as a whole from now on."""
        self.seen[which] = Clock.boundary
        if self.part(which) != self.parts[which]:
            self.is_changing, self.version = True, _UNKNOWN
            self.end_turns()

    def end_turns(self) -> None:
        """It has moved, was written, or is not met any more."""
        self.parts, self.seen, self.looks = [], [], 0

    def begin_look(self, at: int, size: int) -> bool:
        """It is about to be hashed. Returns whether it has moved."""
        has_moved = (self.at, self.end) != (at, at + size)
        if has_moved:
            self.end_turns()
            self.at, self.end = at, at + size
        return has_moved

    def note_change(self, has_changed: bool) -> None:
        """It was hashed; one that has ever changed is recorded each time, and its turns are over."""
        self.is_changing = self.is_changing or has_changed
        if self.is_changing and self.parts:
            self.end_turns()


_met: dict[int, _Met] = {}
_turns: deque[tuple[_Met, list[bytes], int]] = deque()  # parts, the one that was looked at least recently first
_turned_at = -1  # boundary


def _take_turns() -> None:
    """Look at what has been looked at least recently; to be called once at each boundary."""
    global _turned_at
    _turned_at = Clock.boundary
    bytes_left = TURN_BYTES
    for _ in range(len(_turns)):
        entry, parts, which = _turns[0]
        value = entry.reference()
        size = min(TURN_BYTES, entry.end - entry.at)
        if entry.parts is not parts:
            size = 0
        elif (
            value is None
            or entry.asked < Clock.boundary - 1
            or (at := address_of(value)) != entry.at
            or at + value.nbytes != entry.end
        ):
            entry.end_turns()
            size = 0
        if size > bytes_left:
            return
        bytes_left -= size
        _turns.popleft()
        if size:
            entry.look(which)
            _turns.append((entry, parts, which))


def digest_of(view: memoryview) -> bytes:
    """A hash of all bytes, or of blocks spread over more than WHOLE_BYTES."""
    if view.nbytes <= WHOLE_BYTES:
        return xxhash.xxh3_64_digest(view)
    state = xxhash.xxh3_64(view[-_BLOCK_BYTES:])
    for at in range(0, view.nbytes, view.nbytes // _BLOCKS):
        state.update(view[at : at + _BLOCK_BYTES])
    return state.digest()


def fingerprint(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's elements, remembered while it is unchanged."""
    return follow(tensor)[0]


def follow(value: Any) -> tuple[bytes, bool]:
    """(hash of the elements, whether it has ever been changed between two boundaries) of a tensor or numpy array.

    An array has no version counter: one that can be written is hashed at each boundary until its turns begin.
    """
    if _turned_at != Clock.boundary:
        _take_turns()
    is_tensor = type(value) is torch.Tensor or is_a(value, torch.Tensor)
    size = value.nbytes
    if is_tensor and size <= SMALL_BYTES:
        return fingerprint_of_all(value), False
    at = address_of(value)
    version = _version_of(value)
    entry = _met.get(id(value))
    is_known = entry is not None and entry.reference() is value
    if entry is None or not is_known:
        entry = _keep(value)
    entry.asked = Clock.boundary
    is_as_it_was = is_known and entry.is_as_it_was(at, size, version)
    if is_as_it_was and not (accelerator.has_graphs and is_tensor and not value.is_cpu):
        if _has_turns(value, is_tensor):
            entry.note_same(value)
        if entry.version != _UNKNOWN:
            return entry.digest, entry.is_changing
    if entry.begin_look(at, size) and is_tensor:
        entry.probe = _probe(value)
    digest = fingerprint_of_all(value)
    # Only blocks of a larger one were hashed, and something was written to it.
    has_changed = digest != entry.digest or (is_tensor and size > TENSOR_BYTES and not is_as_it_was)
    entry.version, entry.digest, entry.values = version, digest, entry.read_probe()
    if is_known:
        entry.note_change(has_changed)
        if not (has_changed or is_tensor) and _has_turns(value, is_tensor):
            entry.note_same(value)
    return digest, entry.is_changing


def age_of(value: Any) -> int:
    """How many boundaries ago all of a tensor or array that was followed was looked at, at most."""
    entry = _met.get(id(value))
    return Clock.boundary - min(entry.seen) if entry is not None and entry.seen and not Clock.is_whole else 0


def _has_turns(value: Any, is_tensor: bool) -> bool:
    """Whether its memory is in one piece. What is read from a file as it is needed is not to be read because of us."""
    if is_tensor:
        return bool(value.nbytes <= WHOLE_BYTES and value.is_cpu and value.is_contiguous())
    return bool(value.flags.forc and value.flags.writeable)


def address_of(value: Any) -> int:
    """The address of a tensor or array."""
    is_tensor = type(value) is torch.Tensor or is_a(value, torch.Tensor)
    at: int = value.data_ptr() if is_tensor else value.__array_interface__["data"][0]
    return at


def _version_of(value: Any) -> int:
    """A counter that changes with each write, -1 if there is none; constant for a read-only array."""
    if is_a(value, torch.Tensor):
        return -1 if value.is_inference() else value._version
    return -1 if value.flags.writeable else 0


def note_restored(value: Any) -> None:
    """A tensor or array has got what it had been changed to: it is no data that a replay would make again."""
    if not is_followed(value):
        _keep(value)
    _met[id(value)].is_changing = True


def is_followed(value: Any) -> bool:
    """Whether a tensor or array was met before."""
    entry = _met.get(id(value))
    return entry is not None and entry.reference() is value


def array_around(address: int) -> Any:
    """The numpy array, of those that are followed, in whose memory an address lies; None if there is none."""
    around = (entry.reference() for entry in _met.values() if entry.at <= address < entry.end)
    return next((value for value in around if isinstance(value, numpy.ndarray)), None)


def forget() -> None:
    """The run of the script is over."""
    _met.clear()
    _turns.clear()


def _keep(value: Any) -> _Met:
    entry = _Met()
    key = id(value)

    def forget(reference: Any) -> None:
        if _met.get(key) is entry:
            del _met[key]

    entry.reference = weakref.ref(value, forget)
    _met[key] = entry
    return entry


def fingerprint_of_all(value: Any) -> bytes:
    """A hash of the elements of a tensor or array, made anew; of a large one as `follow` makes it."""
    if type(value) is not torch.Tensor and is_a(value, numpy.ndarray):
        return digest_of(numpy.ascontiguousarray(value).reshape(-1).view("u1").data)
    if (
        value.nbytes <= SMALL_BYTES
        and value.is_cpu
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())
    ):
        return digest_of(memoryview(_memory(value.data_ptr(), value.nbytes))) if value.nbytes else b""
    flat = value.detach().resolve_conj().resolve_neg()
    if not (flat.is_contiguous() or flat.is_contiguous(memory_format=torch.channels_last)):
        flat = flat.contiguous()
    if not flat.is_cpu:
        if flat.nbytes > TENSOR_BYTES and flat.is_contiguous():
            return _digest_of_blocks(flat.view(-1).view(torch.uint8))
        flat = flat.cpu()
    if not flat.nbytes:
        return b""
    memory = _memory(flat.data_ptr(), flat.nbytes)
    if flat.nbytes <= TENSOR_BYTES:
        return digest_of(memoryview(memory))
    return _digest_of_blocks(numpy.frombuffer(memory, numpy.uint8))


def _digest_of_blocks(raw: Any) -> bytes:
    """A hash of blocks spread over more bytes than they have together, and of the last ones.

    raw   [bytes]  an array; or a tensor on a device, of which only the blocks are copied to the CPU
    """
    copy = bytes_of if isinstance(raw, torch.Tensor) else numpy.ndarray.tobytes
    state = xxhash.xxh3_64(copy(_blocks(raw, _TENSOR_BLOCKS)))
    state.update(copy(raw[-_BLOCK_BYTES:]))
    return state.digest()


def _blocks(raw: Any, count: int) -> Any:
    """Blocks spread over more bytes than they have together: a row each."""
    stride = len(raw) // count
    return raw[: stride * count].reshape(count, stride)[:, :_BLOCK_BYTES]


def _memory(at: int, size: int) -> Any:
    """Memory as a buffer, without numpy: a tensor on which numpy() was called cannot be resized any more."""
    return (ctypes.c_char * size).from_address(at)


def _probe(tensor: torch.Tensor) -> Any:
    """A view of elements spread over a tensor's memory, which it does not keep alive; None if that is impossible."""
    word = tensor.element_size()
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or word not in (1, 2, 4, 8):
        return None
    words = numpy.frombuffer(_memory(tensor.data_ptr(), tensor.nbytes), dtype=f"u{word}")
    return words[:: max(1, len(words) // _PROBES)]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in `torch`."""
    return str(dtype).removeprefix("torch.")


def tensor_of(dtype: str, shape: list[int], raw: bytes | memoryview) -> torch.Tensor:
    """A new tensor from recorded bytes.

    dtype     torch's name without "torch.", such as "float32"
    raw       its elements, contiguous; empty: the elements are not set
    returns   a contiguous tensor on the CPU, of this shape
    """
    kind = getattr(torch, dtype)
    if not len(raw):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


def form_of(value: Any) -> tuple[str, list[int]] | None:
    """(dtype, shape) of a tensor or array; None of anything else."""
    if is_a(value, torch.Tensor):
        return dtype_name(value.dtype), list(value.shape)
    return (dtype_text(value.dtype), list(value.shape)) if is_a(value, numpy.ndarray) else None


def record_data(snapshot: Snapshot, value: Any, digest: bytes, is_changing: bool) -> DataNode | ChangedDataNode:
    """A large tensor or array: by its digest, or in a blob if the script changes it.

    value                 any dtype, shape and device
    digest, is_changing   as `follow` returns them
    """
    dtype, shape = form_of(value) or ("", [])
    if not is_changing:
        return DataNode(dtype, shape, digest, age_of(value))
    is_tensor = is_a(value, torch.Tensor)
    snapshot.blobs.append(
        plain(value if is_tensor else torch.from_numpy(numpy.ascontiguousarray(value).reshape(-1).view("u1").copy()))
    )
    number = snapshot.number(value)
    first = Number(snapshot.storages.setdefault(address_of(value), number))
    return ChangedDataNode(number, dtype, shape, len(snapshot.blobs) - 1, first)


def compare_data(restore: Restore, live: Any, node: DataNode, name: str) -> Any:
    """Compare what the replay has loaded again, by dtype, shape and digest; it stays in any case."""
    dtype, shape = node.dtype, node.shape
    if not restore.is_comparing:
        return live
    if node.age:
        restore.note_age(name, node.age)
    form = form_of(live)
    if form is None:
        restore.is_same(False, name, "is large data in the lost rank and not in the replacement")
    elif form != (dtype, shape):
        restore.is_same(False, name, f"has shape {form[1]} of {form[0]} where the lost rank had {shape} of {dtype}")
    else:
        restore.is_same(follow(live)[0] == node.digest, name, "has other data than in the lost rank")
        if isinstance(live, torch.Tensor):
            forget_gradient(live)
    return live


def restore_changed_data(restore: Restore, live: Any, node: ChangedDataNode, name: str) -> Any:
    """Restore what the script changes from the record's blobs, in place if the live one has the same form.

    live   a tensor or array of any device, or anything else; a new one is on the CPU
    """
    number, dtype, shape = node.number, node.dtype, node.shape
    raw = restore.blob(node.blob)
    is_tensor = dtype[0].isalpha()
    recorded: Any = tensor_of(dtype, shape, raw) if is_tensor else numpy.frombuffer(raw, dtype_of(dtype)).reshape(shape)
    is_alike = form_of(live) == (dtype, shape)
    if is_alike and not is_tensor and not live.flags.writeable:
        return restore.refuse(live, f"{name} is an array that can be written in the lost rank and not here")
    if is_alike and not (is_tensor and live.grad_fn is not None) and restore.claim(number, live):
        if is_tensor:
            live.data.copy_(recorded)
            if restore.is_comparing:
                forget_gradient(live)
        else:
            live[...] = recorded
        made = live
    elif is_tensor and accelerator.has_graphs and is_alike and not live.is_cpu:
        return restore.refuse(live, f"{name} lies elsewhere here, and a graph of the device may use it")
    else:
        made = recorded if is_tensor else recorded.copy()
        restore.claim(number, made)
    note_restored(made)
    other = restore.object_of(node.first)
    if other is not MISSING and address_of(other) != address_of(made):
        return restore.refuse(live, f"{name} shares its memory with another variable in the lost rank, and not here")
    return made
