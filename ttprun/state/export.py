"""Take a model out of a checkpoint: a file that `model.load_state_dict` takes, without the names of wrappers."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from ttprun.errors import ConfigError, in_short, one_line, suggestion
from ttprun.state.checkpoint import Checkpoint
from ttprun.state.chunks import OWNER
from ttprun.state.files import CannotReshardError, sync, write_file
from ttprun.state.resharding import Piece, assemble, pieces_in
from ttprun.state.tensor_file import tensor_chunks

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
