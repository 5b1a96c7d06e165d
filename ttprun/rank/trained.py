"""What is trained: the script's optimizers and wrapped models, and the tensors that a step changes.

All are told in the order in which the script has made them, which is the same in every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from ttprun.rank.tensor_bytes import bytes_of

_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
_wrapped_models: list[weakref.ref[Any]] = []


def wrap_optimizer_init(original: Any) -> Any:
    """Optimizer.__init__: know the optimizers in the order in which they were made, which is the same in every rank."""

    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _optimizers.append(weakref.ref(self))

    return init


def wrap_ddp_init(original: Any) -> Any:
    """DistributedDataParallel.__init__: know the wrapped models, for their buckets' order."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrapped_models.append(weakref.ref(self))

    return init


def forget() -> None:
    """The run of the script is over."""
    global _stepped
    _optimizers.clear()
    _wrapped_models.clear()
    _stepped = (None, {}, [])
    _samples.clear()


def optimizers() -> list[torch.optim.Optimizer]:
    """All living optimizers, in the order in which they were made."""
    return [found for ref in _optimizers if (found := ref()) is not None]


def wrapped_models() -> list[Any]:
    """All living DistributedDataParallel modules, in the order in which they were made."""
    return [found for ref in _wrapped_models if (found := ref()) is not None]


_stepped: tuple[Any, dict[int, int], list[torch.Tensor]] = (None, {}, [])
# Of each living optimizer: how many parameters, and how many tensors of state, `stepped_tensors` holds of it.
_counts: list[list[int]] = []


def stepped_storages(living: list[torch.optim.Optimizer]) -> dict[int, int]:
    """Data pointers of the storages that the living optimizers update, each with its place in `stepped_tensors`.

    The very same object as before as long as nothing shows that they have changed.
    """
    global _stepped, _counts
    seen = [entry for optimizer in living for entry in _signature(optimizer)]
    if seen != _stepped[0]:
        _samples.clear()
        found: dict[int, int] = {}
        for index, tensor in enumerate(stepped_tensors()):
            found.setdefault(tensor.untyped_storage().data_ptr(), index)
        _stepped = (seen, found, list(parameters()))
        _counts = list(map(_count, living))
    return _stepped[1]


def weights() -> list[torch.Tensor]:
    """The parameters of all optimizers, as they were when they were asked for their storages last."""
    if _stepped[0] is None:
        stepped_storages(optimizers())
    return _stepped[2]


def stepped_tensors() -> list[torch.Tensor]:
    """What the optimizers update, in an order that is the same in every rank: parameters, and the optimizers' state."""
    return [tensor for optimizer in optimizers() for tensor in _tensors(optimizer)]


def _signature(optimizer: torch.optim.Optimizer) -> list[int]:
    """Changes when parameters are added or when the state is loaded anew: counts, and where the ends of them lie."""
    seen = [len(optimizer.state)]
    for group in optimizer.param_groups:
        parameters = group["params"]
        seen.append(len(parameters))
        for parameter in (*parameters[:1], *parameters[-1:]):
            seen.append(parameter.data_ptr())
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        seen.append(value.data_ptr())
    return seen


def _count(optimizer: torch.optim.Optimizer) -> list[int]:
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    return [parameters, sum(1 for _ in _tensors(optimizer)) - parameters]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def parameters() -> Iterator[torch.Tensor]:
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            yield from group["params"]


def counts() -> list[list[int]]:
    """Of each living optimizer: how many parameters, and how many tensors of state, `stepped_tensors` holds of it."""
    return _counts


_samples: dict[tuple[int, int], memoryview] = {}
_SAMPLE_BYTES = 4096


def weights_sample(boundary: int, living: list[torch.optim.Optimizer]) -> bytes:
    """A hash of the beginning of one parameter, another one at each boundary: do ranks hold the same weights?"""
    groups = [group["params"] for optimizer in living for group in optimizer.param_groups]
    count = sum(map(len, groups))
    if not count:
        return b""
    at = boundary % count
    for parameters in groups:
        if at < len(parameters):
            break
        at -= len(parameters)
    parameter = parameters[at]
    key = (id(parameter), parameter.data_ptr())  # the same memory as when it was first asked for
    sample = _samples.get(key)
    if sample is None or not parameter.is_contiguous():
        sample = bytes_of(parameter.detach())[:_SAMPLE_BYTES]
        if parameter.is_contiguous() and parameter.device.type == "cpu":
            _samples[key] = sample
    return xxhash.xxh3_64_digest(sample)
