"""What is trained: the script's optimizers and wrapped models, and the tensors that a step changes.

All are told in the order in which the script has made them, which is the same in every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

from ttprun.rank.sharded import are_any, is_distributed, local_of
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
    _stepped = (None, {}, [], False)
    _samples.clear()


def optimizers() -> list[torch.optim.Optimizer]:
    """All living optimizers, in the order in which they were made."""
    return [found for ref in _optimizers if (found := ref()) is not None]


def wrapped_models() -> list[Any]:
    """All living DistributedDataParallel modules, in the order in which they were made."""
    return [found for ref in _wrapped_models if (found := ref()) is not None]


_stepped: tuple[Any, dict[int, int], list[torch.Tensor], bool] = (None, {}, [], False)
# Of each living optimizer: how many parameters, and how many tensors of state, `stepped_tensors` holds of it.
_counts: list[list[int]] = []


def stepped_storages(living: list[torch.optim.Optimizer]) -> dict[int, int]:
    """Data pointers of what the living optimizers update, see `places`, each with its place in `stepped_tensors`.

    The very same object as before as long as nothing shows that they have changed.
    """
    global _stepped, _counts
    seen = [entry for optimizer in living for entry in _signature(optimizer)]
    if seen != _stepped[0]:
        _samples.clear()
        _stepped = (seen, places(stepped_tensors()), list(parameters()), are_any(parameters()))
        _counts = list(map(_count, living))
    return _stepped[1]


def places(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Where each tensor stands in the sequence, by the addresses of its storage and of its own first element.

    Of tensors that share a storage, the parts of one flat buffer, the storage tells the first.
    """
    held = list(map(local_of, tensors))
    found: dict[int, int] = {}
    for at in ([one.untyped_storage().data_ptr() for one in held], [one.data_ptr() for one in held]):
        for index, address in enumerate(at):
            found.setdefault(address, index)
    return found


def weights() -> list[torch.Tensor]:
    """The parameters of all optimizers, as they were when they were asked for their storages last."""
    if _stepped[0] is None:
        stepped_storages(optimizers())
    return _stepped[2]


def are_sharded() -> bool:
    """Whether some parameter is sharded over the ranks, as of when their storages were asked for last."""
    return _stepped[3]


def stepped_tensors() -> list[torch.Tensor]:
    """What the optimizers update, in an order that is the same in every rank: all parameters, then all of their state.

    An optimizer has its state from its first step on; a replacement's may not have come to that yet.
    """
    return [*parameters(), *(tensor for optimizer in optimizers() for tensor in _state(optimizer))]


def _signature(optimizer: torch.optim.Optimizer) -> list[int]:
    """Changes when parameters are added or when the state is loaded anew: counts, and where the ends of them lie."""
    seen = [len(optimizer.state)]
    is_sharded = _stepped[3]
    for group in optimizer.param_groups:
        parameters = group["params"]
        seen.append(len(parameters))
        for parameter in (*parameters[:1], *parameters[-1:]):
            seen.append((local_of(parameter) if is_sharded else parameter).data_ptr())
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        seen.append((local_of(value) if is_sharded else value).data_ptr())
    return seen


def _count(optimizer: torch.optim.Optimizer) -> list[int]:
    return [sum(len(group["params"]) for group in optimizer.param_groups), sum(1 for _ in _state(optimizer))]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def counts_now() -> list[list[int]]:
    """`counts`, as they are now."""
    return list(map(_count, optimizers()))


def parameters() -> Iterator[torch.Tensor]:
    """What the living optimizers are to update, as they hold it now: one that two of them hold comes twice."""
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            yield from group["params"]


def replicated_weights() -> Iterator[torch.Tensor]:
    """The parameters of all optimizers that all ranks hold alike."""
    return (parameter for parameter in parameters() if not is_distributed(parameter))


def counts() -> list[list[int]]:
    """Of each living optimizer: how many parameters, and how many tensors of state, `stepped_tensors` holds of it."""
    return _counts


_samples: dict[tuple[int, int], memoryview] = {}
_SAMPLE_BYTES = 4096


def weights_sample(boundary: int, living: list[torch.optim.Optimizer]) -> bytes:
    """A hash of the beginning of what this rank holds of one parameter, another one at each boundary."""
    groups = [group["params"] for optimizer in living for group in optimizer.param_groups]
    count = sum(map(len, groups))
    if not count:
        return b""
    at = boundary % count
    for parameters in groups:
        if at < len(parameters):
            break
        at -= len(parameters)
    parameter = local_of(parameters[at])
    key = (id(parameter), parameter.data_ptr())  # the same memory as when it was first asked for
    sample = _samples.get(key)
    if sample is None or not parameter.is_contiguous():
        sample = bytes_of(parameter.detach())[:_SAMPLE_BYTES]
        if parameter.is_contiguous() and parameter.device.type == "cpu":
            _samples[key] = sample
    return xxhash.xxh3_64_digest(sample)


def common_sample(sample: bytes) -> bytes:
    """The part of a sample by which ranks can see whether they hold the same weights: nothing if these are sharded."""
    return b"" if are_sharded() else sample
