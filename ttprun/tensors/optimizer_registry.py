"""The script's optimizers and wrapped models, and the tensors that a step changes.

All in the order in which the script has made them, which is the same in every rank.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash

from ttprun.device import accelerator
from ttprun.introspect import fail_open, model_tensors, ownership
from ttprun.introspect.current_rank import current
from ttprun.introspect.model_tensors import are_any, local_of
from ttprun.introspect.safe_reads import is_a
from ttprun.introspect.tensor_bytes import bytes_of, places

# Call our pre-hook of Optimizer.step after the script's own ones, global and the optimizer's.
#
# A hook of the script may print, or reduce or clip gradients; what it did after our record would be lost with its rank.
# torch calls the global hooks first and then the optimizer's, as the values of a dictionary: ours is appended to these
# values, without being an item.


_NAME = "_optimizer_step_pre_hooks"
_last: Any = None


class _HooksAndOurs(OrderedDict[int, Any]):
    """An optimizer's own hooks before its step."""

    def values(self) -> Any:
        return [*super().values(), _last]


def after_all_others(hook: Any) -> Any:
    """The global hook to register, for `hook` to be called last."""
    global _last
    _last = hook

    def place(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if type(getattr(optimizer, _NAME, None)) is _HooksAndOurs else hook(optimizer, args, kwargs)

    return place


def make_place(optimizer: torch.optim.Optimizer) -> None:
    """Called with a new optimizer, before the script can add hooks; one that has some already is left as it is."""
    if _last is not None and type(own := getattr(optimizer, _NAME, None)) is OrderedDict and not own:
        setattr(optimizer, _NAME, _HooksAndOurs())


_optimizers: list[Callable[[], Any]] = []  # weak references, or what gives the remains of one
_wrapped_models: list[weakref.ref[Any]] = []
_reduced: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()


def wrap_optimizer_init(original: Any) -> Any:
    """Optimizer.__init__: note the optimizers in the order of their making."""

    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        reference = weakref.ref(self, _keep_remains)
        _optimizers.append(reference)
        model_tensors.all_of(self)  # before an engine hides some
        make_place(self)
        _note_made("an optimizer was made", "make it before the loop", reference)

    return init


def wrap_add_param_group(original: Any) -> Any:
    """Optimizer.add_param_group: note what is added during the training."""

    def add_param_group(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        reference = next((ref for ref in _optimizers if ref() is self), None)
        if reference is not None:  # else the optimizer is being made
            _note_made(
                "parameters were added to an optimizer (add_param_group)",
                "give it all parameters before the loop; those that are not to learn yet get requires_grad_(False)",
                reference,
            )
        return result

    return add_param_group


def _note_made(what: str, cure: str, optimizer: Callable[[], Any]) -> None:
    """What the script makes in its loop; a job that is not repaired has no use for it."""
    session = current()
    if session is not None and not session.unprotected:
        session.observers.made(what, cure, lambda: optimizer() is not None, fail_open.caller())


def wrap_ddp_init(original: Any) -> Any:
    """DistributedDataParallel.__init__: note the wrapped models, for their buckets' order."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrapped_models.append(weakref.ref(self))
        left_out = getattr(self, "parameters_to_ignore", ())
        named = self.module.named_parameters()
        _reduced[self] = [parameter for name, parameter in named if parameter.requires_grad and name not in left_out]

    return init


def _keep_remains(dead: Any) -> None:
    """An optimizer is dropped: its state is kept if the script has returned from all that it does.

    Its rank may then wait at its end for others, and be the one that holds what a replacement needs.
    """
    place = _optimizers.index(dead) if dead in _optimizers else -1
    remains = _remains.pop(dead, None)
    if remains is not None and place >= 0 and ownership.is_reached(sys._getframe().f_back):
        _optimizers[place] = lambda: remains


def forget() -> None:
    """The run of the script is over."""
    global _stepped
    _remains.clear()
    _optimizers.clear()
    _wrapped_models.clear()
    _reduced.clear()
    _stepped = None


class Remains:
    """What counts of an optimizer, for as long as it lives and perhaps longer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = model_tensors.all_of(optimizer)
        self.state = optimizer.state
        self.param_groups = [{**settings, "params": parameters} for settings, parameters in self.groups]


_remains: dict[Any, Remains] = {}  # by the weak reference


def note_remains() -> None:
    """The newest boundary is passed."""
    for ref in _optimizers:
        optimizer = ref()
        if optimizer is not None:
            remains, groups = _remains.get(ref), model_tensors.all_of(optimizer)
            if remains is None or remains.groups is not groups or remains.state is not optimizer.state:
                _remains[ref] = Remains(optimizer)


# Functions called at each boundary use plain loops, which are faster than comprehensions here.


def optimizers() -> list[torch.optim.Optimizer]:
    """All living optimizers, in the order in which they were made."""
    living = []
    for ref in _optimizers:
        optimizer = ref()
        if optimizer is not None:
            living.append(optimizer)
    return living


def number_of(optimizer: Any) -> int | None:
    """Its place among `optimizers()`; None if it is not among them."""
    return next((number for number, other in enumerate(optimizers()) if other is optimizer), None)


def wrapped_models() -> list[Any]:
    """All living DistributedDataParallel modules, in the order in which they were made."""
    return [model for ref in _wrapped_models if (model := ref()) is not None]


def reduced_by(model: Any) -> list[torch.Tensor]:
    """The parameters whose gradients a wrapped model reduces: those that were to be trained when it was made.

    A script may freeze them for a while, as a GAN does with the one of its networks that does not learn now.
    """
    return _reduced[model]


def rebuilt() -> list[bool]:
    """Of each living wrapped model, whether it has rebuilt its buckets."""
    have = []
    for ref in _wrapped_models:
        model = ref()
        if model is not None:
            have.append(bool(model._has_rebuilt_buckets))
    return have


class Stepped:
    """The tensors that the living optimizers update, at a boundary.

    seen        counts and addresses, by which a change is detected, see `stepped`
    storages    data pointer of each tensor -> its index in `stepped_tensors`, see `places`
    weights     the parameters of all optimizers
    counts      of each optimizer: number of parameters, and of state tensors, in `stepped_tensors`
    is_sharded  some parameter is sharded over the ranks
    is_on_cpu   all of them are
    held        the list of parameters of each group of each optimizer
    """

    def __init__(self, seen: list[int], groups: list[list[torch.Tensor]]) -> None:
        self.seen = seen
        self.storages = places(stepped_tensors())
        self.weights = list(parameters())
        self.counts = counts_now()
        self.is_sharded = are_any(self.weights)
        self.is_on_cpu = all(weight.is_cpu for weight in self.weights)
        self.held = groups
        places_held = [(of_group, at) for of_group, group in enumerate(groups) for at in range(len(group))]
        # Of each parameter: its group and index there; and once sampled: itself, its address, and its sample.
        self._samples: list[tuple[int, int, Any, int, Any]] = [(*place, None, 0, b"") for place in places_held]

    def sample(self, boundary: int) -> bytes:
        """A hash of the first bytes of this rank's part of one parameter, another one at each boundary."""
        samples = self._samples
        if not samples:
            return b""
        number = boundary % len(samples)
        of_group, at, last, address, sample = samples[number]
        group = self.held[of_group]
        parameter = group[at] if at < len(group) else self.weights[number]
        if self.is_sharded:
            parameter = local_of(parameter)
        if parameter is not last or parameter.data_ptr() != address or not parameter.is_contiguous():
            parameter = local_of(parameter)
            sample = bytes_of(_beginning(parameter))[:_SAMPLE_BYTES]
            if parameter.is_contiguous() and parameter.device.type == "cpu":
                samples[number] = (of_group, at, parameter, parameter.data_ptr(), sample)
        return xxhash.xxh3_64_digest(sample)

    def sample_later(self, boundary: int) -> torch.Tensor | bytes:
        """`sample` of this moment; of a parameter on a device a copy of what it hashes, there, for `hash_of`."""
        if not self._samples:
            return b""
        of_group, at, *_ = self._samples[boundary % len(self._samples)]
        group = self.held[of_group]
        parameter = local_of(group[at]) if at < len(group) else None
        return self.sample(boundary) if parameter is None or parameter.is_cpu else _beginning(parameter).clone()


def hash_of(sampled: torch.Tensor) -> bytes:
    """What `Stepped.sample` returns, of what `Stepped.sample_later` does."""
    return xxhash.xxh3_64_digest(bytes_of(sampled)[:_SAMPLE_BYTES])


def _beginning(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter; of one on a device the beginning, as it has to be copied."""
    flat = parameter.detach()
    return flat if flat.is_cpu else flat.reshape(-1)[:_SAMPLE_BYTES]


_stepped: Stepped | None = None
_SAMPLE_BYTES = 4096


def stepped(living: list[torch.optim.Optimizer]) -> Stepped:
    """The tensors that these optimizers, all living ones, update now.

    Returns the same object as before unless counts, or the addresses of the first and last parameter of each group and
    of their state, have changed, as they do when parameters are added or state is loaded.
    """
    global _stepped
    last = _stepped
    is_sharded = last is not None and last.is_sharded
    seen: list[int] = []
    groups: list[list[torch.Tensor]] = []
    for optimizer in living:
        state = optimizer.state
        seen.append(len(state))
        for _, in_group in model_tensors.all_of(optimizer):
            groups.append(in_group)
            seen.append(len(in_group))
            for end in (in_group[0], in_group[-1]) if in_group else ():
                seen.append((local_of(end) if is_sharded else end).data_ptr())
                of_end = state.get(end)
                for value in dict.values(of_end) if type(of_end) is dict or is_a(of_end, dict) else ():
                    if type(value) is torch.Tensor or is_a(value, torch.Tensor):
                        seen.append((local_of(value) if is_sharded else value).data_ptr())
    if last is None or seen != last.seen:
        last = _stepped = Stepped(seen, groups)
    last.held = groups
    return last


def newest() -> Stepped:
    """What the optimizers updated at the newest boundary; what they update now if there was none."""
    return _stepped or stepped(optimizers())


def are_sharded() -> bool:
    """Whether some parameter is sharded over the ranks, at the newest boundary."""
    return _stepped is not None and _stepped.is_sharded


def stepped_tensors() -> list[torch.Tensor]:
    """The tensors that the optimizers update, in the same order in every rank: all parameters, then all state.

    An optimizer has its state from its first step on; a replacement's may not have taken it yet.
    """
    return [*parameters(), *(tensor for optimizer in optimizers() for tensor in _state(optimizer))]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        if is_a(state, dict):
            yield from (value for value in dict.values(state) if is_a(value, torch.Tensor))


def counts_now() -> list[list[int]]:
    """`counts` of `Stepped`, as they are now."""
    of_each = [(parameters_of(optimizer), _state(optimizer)) for optimizer in optimizers()]
    return [[sum(1 for _ in tensors) for tensors in both] for both in of_each]


def weights_bytes() -> int:
    """Bytes of this rank's weights; of a sharded one, of its part."""
    return sum(local_of(weight).nbytes for weight in {id(parameter): parameter for parameter in parameters()}.values())


def parameters() -> Iterator[torch.Tensor]:
    """The parameters of the living optimizers now; one in two optimizers comes twice."""
    for optimizer in optimizers():
        yield from parameters_of(optimizer)


def device_in_use() -> torch.device | None:
    """The device of the script's parameters; None if no device is in use, or they are not on it."""
    device = accelerator.in_use()
    if device is None:
        return None
    return next((parameter.device for parameter in parameters() if parameter.device.type == device[0]), None)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The parameters of one optimizer now, in the order of its groups; those that it is not shown, too."""
    for group in model_tensors.all_of(optimizer):
        yield from group.parameters
