"""Load tensors that are sharded over the ranks from files whose parts were cut otherwise, or in the same way.

What must be read from where is torch.distributed.checkpoint's planner's business; here it gets a reader of our files of
tensors, whose headers say which part of a whole each tensor is. No process group is used: each rank reads by itself.
Begin with `Piece`, what a file holds of a tensor, and `load`; a model for `load_state_dict` is taken by `load_model`.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ttprun.errors import ConfigError, in_short, one_line, suggestion
from ttprun.state.checkpoint import Checkpoint
from ttprun.state.chunks import OWNER
from ttprun.state.files import CannotReshardError, sync, write_file
from ttprun.state.tensor_file import SHARDING_KEY, tensor_chunks, torch_dtype


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


class TensorFiles(StorageReader):
    """Files of tensors for torch.distributed.checkpoint.

    pieces  key -> what the files hold of it, each part once
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.pieces = pieces_of(paths)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the planner must know."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, str] = {}
        for key, pieces in self.pieces.items():
            boxes = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces]
            size = torch.Size(pieces[0].shape)
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=pieces[0].dtype), size, boxes)
            places |= {MetadataIndex(key, torch.Size(piece.offsets)): piece.path for piece in pieces}
        return Metadata(state_dict_metadata=tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, file by file."""
        by_path = defaultdict(list)
        for item in plan.items:
            by_path[self._places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]].append(item)
        for path, items in by_path.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    cut = tuple(slice(begin, begin + length) for begin, length in ranges)
                    key = item.storage_index.fqn
                    read = file.get_slice(key)[cut] if cut else file.get_tensor(key)
                    target = planner.resolve_tensor(item)
                    target.copy_(read)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one reading to the next."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(checkpoint_id)


def load(targets: Mapping[str, Tensor], paths: Sequence[str]) -> None:
    """Fill tensors from files in which they lie, whole or in parts, under the same keys.

    targets  key -> where its elements go; of a DTensor, those of this rank. Written in place
    paths    of all files

    Raises CannotReshardError if a tensor has another shape or type in the files, or is not whole there; then some of
    the targets may have been written. Raises OSError.
    """
    try:
        reader = TensorFiles(paths)
        for key, target in targets.items():
            _check(key, target, reader.pieces.get(key, []))
        planner = DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(targets), metadata, is_coordinator=False)
        plan = planner.create_local_plan()
        _check_whole(targets, plan)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        with torch.no_grad():
            reader.read_data(plan, planner)
    except (ValueError, KeyError, RuntimeError) as error:  # of JSON, the planner, and torch
        raise CannotReshardError(f"the tensors cannot be read ({one_line(error)})") from error


def _check(key: str, target: Tensor, pieces: list[Piece]) -> None:
    if not pieces:
        raise CannotReshardError(f"{key} is in none of the checkpoint's files")
    for piece in pieces:
        if piece.shape != tuple(target.shape) or piece.dtype != target.dtype:
            raise CannotReshardError(
                f"{key} is {list(piece.shape)} of {piece.dtype} in the checkpoint, and {list(target.shape)} of "
                f"{target.dtype} here"
            )


def _check_whole(targets: Mapping[str, Tensor], plan: LoadPlan) -> None:
    """The planner is content with what there is."""
    read: dict[str, int] = defaultdict(int)
    for item in plan.items:
        read[item.dest_index.fqn] += prod(item.lengths)
    for key, target in targets.items():
        local = target.to_local() if hasattr(target, "to_local") else target
        if read[key] != local.numel():
            raise CannotReshardError(f"{key} is not whole in the checkpoint: {read[key]} of {local.numel()} elements")


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
        whole = [piece for piece in pieces.get(key, ()) if piece.path == path and piece.is_whole]
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
