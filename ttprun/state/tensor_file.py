"""Tensors as a safetensors file, in one pass over their own memory.

The library copies everything first (before 0.8), refuses tensors that share memory, and cannot hash what it writes; the
format is a header and the elements, so we write it ourselves and read it with the library.
Format: https://huggingface.co/docs/safetensors/index#format

No process group is used to read: each rank reads by itself, with `load`; `load_model` takes a model out of the files.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ttprun.errors import ConfigError, in_short, one_line, suggestion
from ttprun.state.chunks import OWNER, Chunk
from ttprun.state.files import CannotReshardError, sync, write_file

if TYPE_CHECKING:
    from ttprun.state.checkpoint import Checkpoint

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
        chunk = chunks.get(key) or Chunk.whole(tensor.shape)
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


# Read tensors in other parts than they were written: the headers say which part of a whole each tensor of a file is.


class Piece(NamedTuple):
    """A tensor of a file.

    part   all of a tensor, or which part of it
    """

    path: str
    dtype: torch.dtype
    part: Chunk


def pieces_in(path: str) -> dict[str, Piece]:
    """Key -> what a file of tensors holds of it. Raises CannotReshardError, OSError."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:
            raise CannotReshardError(f"'{path}' is not a file of tensors")
        raw = file.read(size)
    try:
        header = json.loads(raw)
        slices = json.loads(header.pop(_METADATA_KEY, {}).get(SHARDING_KEY, "{}"))
        pieces = {}
        for key, entry in header.items():
            sizes = tuple(entry["shape"])
            place = slices.get(key, {"saved_offsets": [0] * len(sizes), "shape": sizes})
            part = Chunk(tuple(place["shape"]), tuple(place["saved_offsets"]), sizes)
            pieces[key] = Piece(path, getattr(torch, _CODES[entry["dtype"]]), part)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotReshardError(f"the header of '{path}' cannot be read ({error!r})") from None
    return pieces


def pieces_of(paths: Iterable[str]) -> dict[str, list[Piece]]:
    """Key -> what all files hold of it; ranks that held the same part have written it each for itself.

    Raises CannotReshardError, OSError.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in paths:
        for key, piece in pieces_in(path).items():
            pieces.setdefault(key, []).append(piece)
    return pieces


def assemble(key: str, pieces: Sequence[Piece]) -> Tensor:
    """A whole tensor, on the CPU. Raises CannotReshardError if a part of it is in no file, and OSError.

    key      of the tensor in the files
    pieces   of one tensor; several may be the same part
    returns  of its dtype and shape
    """
    shape, dtype = (pieces[0].part.shape, pieces[0].dtype) if pieces else ((), None)
    whole = torch.empty(shape, dtype=dtype)
    _fill(key, whole, Chunk.whole(shape), pieces, partial(safe_open, framework="pt"))
    return whole


def load(targets: Mapping[str, tuple[Tensor, Chunk]], paths: Sequence[str]) -> None:
    """Fill tensors from files in which they lie, whole or in parts that were cut in any way, under the same keys.

    targets  key -> where the elements of a part go, on any device, and which part of the whole that is
    paths    of all files

    Raises CannotReshardError if a tensor has another shape or type in the files, or is not whole there; then some of
    the targets may have been written. Raises OSError.
    """
    pieces, opened = pieces_of(paths), cache(partial(safe_open, framework="pt"))
    try:
        for key, (target, part) in targets.items():
            _fill(key, target, part, pieces.get(key, ()), opened)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CannotReshardError(f"the tensors cannot be read ({one_line(error)})") from error


def _fill(key: str, target: Tensor, part: Chunk, pieces: Iterable[Piece], opened: Callable[[str], Any]) -> None:
    """Copy the elements of a part from the pieces in which they lie."""
    distinct = {piece.part: piece for piece in pieces}
    if not distinct:
        raise CannotReshardError(f"{key} is in none of the checkpoint's files")
    there = 0
    for box, piece in [(box, piece) for box, piece in distinct.items() if box.is_whole][:1] or distinct.items():
        if box.shape != part.shape or piece.dtype != target.dtype:
            raise CannotReshardError(
                f"{key} is {list(box.shape)} of {piece.dtype} in the checkpoint, and {list(part.shape)} of "
                f"{target.dtype} here"
            )
        begins = list(map(max, box.offsets, part.offsets))
        ends = [min(ends) for ends in zip(box.ends, part.ends, strict=True)]
        if all(map(lt, begins, ends)):
            stored, here = (
                tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, offsets, strict=True))
                for offsets in (box.offsets, part.offsets)
            )
            file = opened(piece.path)
            read = file.get_slice(key)[stored] if stored else file.get_tensor(key)
            with torch.no_grad():
                target[here].copy_(read)
            there += read.numel()
    if there != part.count:
        raise CannotReshardError(f"{key} is not whole in the checkpoint: {there} of {part.count} elements")


# Take a model out of a checkpoint: a file that `model.load_state_dict` takes, without the names of wrappers.


Format = Literal["torch", "safetensors", "dcp"]

# What DistributedDataParallel, torch.compile and FSDP prefix to every name of the module that they wrap.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
# Those of them that no user's module is called, so that they can go wherever they stand.
_RESERVED = frozenset({"_orig_mod", "_fsdp_wrapped_module"})


def choose_model(checkpoint: Checkpoint, name: str | None = None) -> Mapping[str, tuple[str, str]]:
    """The model of that name in a checkpoint, or the only one: name in its state_dict -> file, key in the file.

    Raises ConfigError if there is none, or if there are several and none is named; InvalidCheckpointError.
    """
    models = checkpoint.valid_manifest().model
    if not models:
        raise ConfigError(f"checkpoint '{checkpoint.path}' names no model", "export it from your script")
    choices = ", ".join(f"'{model}'" for model in sorted(models))
    if name is None:
        if len(models) > 1:
            raise ConfigError(f"checkpoint '{checkpoint.path}' holds several models", f"choose by --model: {choices}")
        (name,) = models
    if name not in models:
        raise ConfigError(f"--model: there is no '{name}'", suggestion(name, models, f"choose one of {choices}"))
    return models[name]


def load_model(checkpoint: Checkpoint, model: Mapping[str, tuple[str, str]]) -> dict[str, Tensor]:
    """Read a model's tensors; names that are the same tensor in the file (tied weights) get the same one here, and one
    that was sharded over the ranks is put together.

    model    as `choose_model` returns it
    returns  names without wrappers -> tensors on the CPU

    Raises InvalidCheckpointError, or ConfigError if a file does not hold what the manifest says.
    """
    differing = sorted(name for name, (_, key) in model.items() if OWNER in key)
    if differing:
        raise ConfigError(
            f"checkpoint '{checkpoint.path}': the ranks held different values of {in_short(differing)}, and only the "
            "script knows how these make up one model",
            "export it from your script",
        )
    pieces = _pieces(checkpoint)
    read: dict[tuple[str, str], Tensor] = {}
    for file, key in sorted(set(model.values())):
        path = str(checkpoint.file(file))
        whole = [piece for piece in pieces.get(key, ()) if piece.path == path and piece.part.is_whole]
        try:
            read[file, key] = assemble(key, whole or pieces.get(key, ()))
        except Exception as error:  # the library's own type, ours, or OSError
            raise _unreadable(path, error) from None
    plain = names_without_wrappers(model)
    return {plain[name]: read[place] for name, place in model.items()}


def _pieces(checkpoint: Checkpoint) -> dict[str, list[Piece]]:
    """Key -> what each file of tensors holds of it."""
    pieces: dict[str, list[Piece]] = {}
    for name in checkpoint.valid_manifest().files:
        if name.endswith(".safetensors"):
            path = str(checkpoint.file(name))
            try:
                of_file = pieces_in(path)
            except (CannotReshardError, OSError) as error:
                raise _unreadable(path, error) from None
            for key, piece in of_file.items():
                pieces.setdefault(key, []).append(piece)
    return pieces


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"'{path}' cannot be read ({one_line(error)})", "choose another checkpoint")


def names_without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map each name of a state_dict to the one that the bare module has.

    `module.` goes only if every name begins with it: a user's own attribute may be called so, a wrapper leaves no name
    out. If two names would become one, all are left as they are.
    """
    whole = list(names)
    plain = whole
    while plain and (wrapper := next((name for name in _WRAPPERS if all(n.startswith(name) for n in plain)), None)):
        plain = [name.removeprefix(wrapper) for name in plain]
    plain = [".".join(part for part in name.split(".") if part not in _RESERVED) for name in plain]
    if len(set(plain)) < len(whole) or "" in plain:
        plain = whole
    return dict(zip(whole, plain, strict=True))


def write_model(tensors: Mapping[str, Tensor], target: Path, form: Format) -> int:
    """Write a state_dict to a file, or a directory, which appears only when it is whole.

    tensors   of any dtype and shape, on the CPU
    target    must not exist yet
    form      "torch": as torch.save writes it; "safetensors"; or "dcp": a directory from which
              torch.distributed.checkpoint loads it in any layout
    returns   its size in bytes

    Raises ConfigError if it cannot be written, or is there already.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if target.exists():
        raise ConfigError(f"--out: there is a file '{target}'", "name a new one")
    draft = part_of(target)
    try:
        _remove(draft)
        if form == "torch":
            torch.save(dict(tensors), draft)
            sync(draft)
        elif form == "dcp":
            with warnings.catch_warnings(action="ignore"):  # that there is no process group
                save(dict(tensors), checkpoint_id=draft, no_dist=True)
        else:
            write_file(draft, tensor_chunks(tensors, {"format": "pt"}))
        size = sum(file.stat().st_size for file in (draft, *draft.rglob("*")) if file.is_file())
        draft.replace(target)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a full disk into a RuntimeError
        raise ConfigError(f"--out: '{target}' cannot be written ({one_line(error)})", "name another file") from None
    finally:
        with suppress(OSError):
            _remove(draft)
    return size


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)


def part_of(target: Path) -> Path:
    """What grows while `write_model` is at work."""
    return target.with_name(f".{target.name}.part")
