"""A small model, its wrappers, and checkpoints that hold it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.state.making import locked
from ttprun.state.checkpoint import Checkpoint, Description
from ttprun.state.tensor_file import tensor_chunks


class Net(nn.Module):
    """Tied weights, a buffer, a scalar buffer, and an inner module that is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def net(seed: int) -> Net:
    """One with weights and buffers of its own."""
    torch.manual_seed(seed)
    made = Net()
    made.norm.num_batches_tracked += seed
    return made


def save(save_dir: Path, models: dict[str, nn.Module], boundary: int = 120) -> Checkpoint:
    """A checkpoint of these variables, as ranks write it: each storage once, alternately in two files."""
    files: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    places: dict[int, tuple[str, str]] = {}
    named: dict[str, dict[str, tuple[str, str]]] = {}
    for variable, module in models.items():
        for name, tensor in module.state_dict().items():
            if tensor.data_ptr() not in places:
                number = len(places) % 2
                key = f"model/{len(places)}"
                files[number][key] = tensor
                places[tensor.data_ptr()] = (f"tensors-{number:05d}.safetensors", key)
            named.setdefault(variable, {})[name] = places[tensor.data_ptr()]
    draft = locked(save_dir).begin(boundary)
    for number, tensors in enumerate(files):
        draft.add(f"tensors-{number:05d}.safetensors", tensor_chunks(tensors))
    return draft.commit(Description(world_size=2, cause="signal", script="train.py", model=named))
