"""The share of a snapshot or checkpoint that one rank writes, and loading all shares again.

All replicas hold the same tensors, so each writes some of them. Which, follows from the tensors' sizes alone: all ranks
come to the same division without talking. A share is a file of safetensors, in the memory of a snapshot too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors
import torch
import xxhash

from ttprun.channel import Message
from ttprun.rank import replicated
from ttprun.rank.frames import SCALARS, user_frames
from ttprun.rank.memory import Memory
from ttprun.state.files import write_file
from ttprun.state.tensor_file import chunks, lay_out

_MOST_MODULES = 16
Named = list[tuple[str, torch.Tensor]]


def file_of(share: int) -> str:
    """Name of a share's file in a checkpoint."""
    return f"tensors-{share:05d}.safetensors"


def divide(sizes: list[int], of: int) -> list[int]:
    """The share to which each tensor goes: the largest first, each to the share that is smallest so far."""
    filled = [0] * of
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = filled.index(min(filled))
        owners[index] = owner
        filled[owner] += sizes[index]
    return owners


def write(path: str, share: int, of: int, frame: FrameType | None) -> Message:
    """Write one share of what this rank holds to a new file of a checkpoint; a file of an earlier attempt is removed.

    share  number of it, from 0; the first one has the models' own tensors too
    of     how many shares there are
    frame  innermost of the main thread's: its variables name the models

    returns  what the agent must know: bytes, xxh3, header, a hash of the header, names of the models' tensors

    Raises NotRepairableError, OSError.
    """
    told, header, tensors = _describe(share, of, frame)
    Path(path).unlink(missing_ok=True)
    entry = write_file(Path(path), chunks(header, tensors))
    return told | {"bytes": entry.bytes, "xxh3": entry.xxh3}


def copy(memory: Memory, share: int, of: int, frame: FrameType | None) -> Message:
    """Copy one share of what this rank holds into shared memory; arguments, result and errors as those of `write`."""
    told, header, tensors = _describe(share, of, frame)
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    memory.fill(size, chunks(header, tensors))
    return told | {"bytes": size, "xxh3": ""}


def _describe(share: int, of: int, frame: FrameType | None) -> tuple[Message, bytes, list[torch.Tensor]]:
    """(what the agent must know, header of the file, tensors of the file) of one share."""
    header, tensors = replicated.describe()
    owners = divide([tensor.nbytes for _, tensor in tensors], of)
    mine = [named for named, owner in zip(tensors, owners, strict=True) if owner == share]
    told: Message = {"header_xxh3": xxhash.xxh3_64_hexdigest(json.dumps(header).encode()), "share": share}
    if share == 0:
        files = {key: file_of(owner) for (key, _), owner in zip(tensors, owners, strict=True)}
        models, own = _models(frame, {_place(tensor): key for key, tensor in replicated.live_tensors()})
        files |= {key: file_of(0) for key, _ in own}
        told |= {
            "header": header,
            "files": files,
            "model": {name: {n: [files[key], key] for n, key in names.items()} for name, names in models.items()},
        }
        mine += own
    try:
        return told, *lay_out(dict(mine), {"format": "pt"})
    except ValueError as error:
        raise replicated.NotRepairableError(str(error)) from None


def load(header: list[Any], files: list[str]) -> None:
    """Take over the state that all shares hold together.

    header  as `replicated.describe` gives it
    files   paths of all shares

    Raises NotRepairableError, OSError.
    """
    opened: list[Any] = [safetensors.safe_open(path, framework="pt") for path in files]
    holder = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - it is no mapping

    def fill(key: str, tensor: torch.Tensor) -> None:
        if key not in holder:
            raise replicated.NotRepairableError(f"{key} is in none of the checkpoint's files")
        found = holder[key].get_tensor(key)
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise replicated.NotRepairableError(f"{key} is {list(found.shape)} of {found.dtype} in the checkpoint")
        with torch.no_grad():
            tensor.copy_(found)

    replicated.take_over(header, fill)


def _models(frame: FrameType | None, keys: dict[Any, str]) -> tuple[dict[str, dict[str, str]], Named]:
    """The modules in the user's variables: (variable -> name in its state_dict -> key, tensors that have no key yet).

    keys   of what the optimizers update, by place in memory
    """
    models: dict[str, dict[str, str]] = {}
    own: Named = []
    known = dict(keys)
    for variable, module in _modules(frame):
        names: dict[str, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            tensor = value.detach()
            key = known.get(_place(tensor)) if tensor.numel() else None
            if key is None:
                key = known[_place(tensor)] = f"{variable}/{name}"
                own.append((key, tensor))
            names[name] = key
        if names:
            models[variable] = names
    return models, own


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _modules(frame: FrameType | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules in the variables of the user's frames, and in attributes of objects there: ("model", ...), first few."""
    found: dict[str, torch.nn.Module] = {}
    for user_frame in user_frames(frame):
        for name, value in list(user_frame.f_locals.items()):
            if name.startswith("__") or type(value) in SCALARS:
                continue
            if isinstance(value, torch.nn.Module):
                found[name] = value
            elif type(value).__module__ == "__main__" and isinstance(getattr(value, "__dict__", None), dict):
                attributes = vars(value).items()
                found |= {f"{name}.{key}": part for key, part in attributes if isinstance(part, torch.nn.Module)}
    yield from list(found.items())[:_MOST_MODULES]
