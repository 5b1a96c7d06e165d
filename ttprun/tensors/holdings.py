"""Digests of this rank's trained tensors, by which the agent knows which ranks are replicas of each other.

A full look hashes every parameter of the optimizers with its gradient and its optimizer state, on the main thread,
before the step. It is taken at the first two steps of an optimizer, when parameters or groups were added, and after a
recovery. In between, each record holds some bytes of every parameter whose gradient DistributedDataParallel does not
reduce over all ranks: shards that began with equal values and diverge later are seen there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import xxhash

from ttprun.introspect.model_tensors import is_distributed, local_of, parameters_of, shown_to
from ttprun.introspect.ownership import user_frames, variables_of
from ttprun.introspect.safe_reads import is_a, items_of, pairs_of, plain_of
from ttprun.introspect.tensor_bytes import content_of
from ttprun.protocol.reason import Reason
from ttprun.tensors import optimizer_registry, replicated, sharded
from ttprun.tensors.gradients import GRADIENT
from ttprun.tensors.shares import modules_in

FIRST_LOOKS = 2  # of each optimizer: its state exists from its first step on
SAMPLE_BYTES = 64
_MOST_SAMPLES = 64  # parameters, at one boundary
_STRIDE = 8191  # bytes by which the sampled place moves from boundary to boundary


class Holdings:
    """Decides when a full look is needed, and samples parameters; called in each step."""

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen: optimizer_registry.Stepped | None = None
        self._groups_count = 0
        self._sampled: tuple[optimizer_registry.Stepped | None, list[torch.Tensor]] = (None, [])
        self._layouts: list[Any] = []  # of the parameters at the newest step
        self._why_moved = Reason()

    def are_new(self, stepped: optimizer_registry.Stepped, optimizer: torch.optim.Optimizer, groups_count: int) -> bool:
        """Whether a full look is needed before this step; the same in all ranks that train alike.

        groups_count   process groups that the script has made so far
        """
        looks = self._looks.get(optimizer, 0)
        if stepped is self._seen and groups_count == self._groups_count and looks >= FIRST_LOOKS:
            return False
        self._looks[optimizer] = looks + 1
        self._seen, self._groups_count = stepped, groups_count
        return True

    def note(self, stepped: optimizer_registry.Stepped) -> None:
        """This is what the look just asked for is taken of."""
        self._seen = stepped

    def forget(self) -> None:
        """The run of the script is over: drop its tensors."""
        self._seen, self._sampled = None, (None, [])
        self._layouts, self._why_moved = [], Reason()

    def why_moved(self, stepped: optimizer_registry.Stepped) -> Reason:
        """Why a replay would not shard the parameters as they are now; "" if it would.

        It skips the iteration in which the script has redistributed one: the replacement has it as it was made.
        """
        if not (stepped.is_sharded or self._layouts):
            return Reason()
        now = [parameter for group in stepped.held for parameter in group]
        layouts = [getattr(parameter, "_spec", None) for parameter in now]
        before, self._layouts = self._layouts, layouts
        if len(before) == len(layouts) and not self._why_moved:
            for number, (old, new) in enumerate(zip(before, layouts, strict=True)):
                if old is not new and (old and (old.mesh, old.placements)) != (new and (new.mesh, new.placements)):
                    had, has = (spec.placements if spec else "in one piece" for spec in (old, new))
                    self._why_moved = Reason(
                        "made-inside-the-loop",
                        f"a parameter (number {number + 1} of the optimizers) was redistributed during the training, "
                        f"from {had} to {has}, and a replay would not do that again: redistribute it before the loop",
                    )
        return self._why_moved

    def mark(
        self, stepped: optimizer_registry.Stepped, optimizer: torch.optim.Optimizer | None, boundary: int
    ) -> bytes:
        """A hash of some bytes of each parameter that may differ between ranks, and of its gradient.

        stepped     the tensors of all optimizers, at this boundary
        optimizer   about to make its step, so that its parameters' gradients are hashed too; None: none is
        boundary    chooses which bytes, and of more than _MOST_SAMPLES parameters which of them
        returns     8 bytes; b"" if all parameters are reduced over all ranks, or are DTensors
        """
        if stepped is not self._sampled[0]:
            managed = set(map(id, reduced_over_all()))
            sampled = [weight for weight in stepped.weights if not (id(weight) in managed or is_distributed(weight))]
            self._sampled = stepped, sampled
        sampled = self._sampled[1]
        if not sampled:
            return b""
        own = set() if optimizer is None else set(map(id, shown_to(optimizer)))
        start = boundary * _MOST_SAMPLES % len(sampled)
        hasher = xxhash.xxh3_64()
        for parameter in (sampled[start:] + sampled[:start])[:_MOST_SAMPLES]:
            hasher.update(_some_bytes(parameter, boundary))
            if parameter.grad is not None and id(parameter) in own:
                hasher.update(_some_bytes(parameter.grad, boundary))
        return hasher.digest()


def in_full(optimizer: torch.optim.Optimizer | None, has_settings: bool = True) -> dict[str, tuple[str, str]]:
    """Key of each parameter -> (digest of its weights, digest of its gradient, state and hyper-parameters).

    Of a sharded one they are of this rank's part.

    optimizer     about to step; gradients of others are left out, as they may be incomplete
    has_settings  with hyper-parameters
    """
    shown = set() if optimizer is None else set(map(id, shown_to(optimizer)))
    return {
        key: (
            _hash(parameter),
            _hash_of_rest(
                _own(state), group if has_settings else {}, parameter.grad if id(parameter) in shown else None
            ),
        )
        for key, parameter, state, group, _ in replicated.rows()
    }


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state of a parameter without the gradient that it has used."""
    return {name: value for name, value in state.items() if name != GRADIENT}


def shards() -> tuple[dict[str, tuple[str, str]], str]:
    """Of each parameter of which this rank holds a part (how it is cut, which part); and why they cannot be stored."""
    parts = {key: parameter for key, parameter, *_ in replicated.rows() if sharded.place_of(parameter) is not None}
    cuts = {key: (sharded.layout_of(part), sharded.place_of(part) or "") for key, part in parts.items()}
    return cuts, str(sharded.why_not_stored(parts.values()))


def to_verify(optimizer: torch.optim.Optimizer) -> list[tuple[str, bool, torch.Tensor]]:
    """The tensors of a periodic comparison: (key, whether it is the gradient, tensor).

    Gradients that DistributedDataParallel does not reduce are included: they distinguish a replica that has diverged
    from ranks that are not replicas.
    """
    managed = set(map(id, reduced_over_all()))
    shown = set(map(id, shown_to(optimizer)))
    tensors = []
    for key, parameter in [(key, weight) for key, weight, *_ in replicated.rows() if not is_distributed(weight)]:
        tensors.append((key, False, parameter))
        gradient = parameter.grad
        if id(parameter) in shown and gradient is not None and id(parameter) not in managed and _is_dense(gradient):
            tensors.append((key, True, gradient))
    return tensors


def names(frame: FrameType | None, *, is_by_id: bool = False) -> dict[Any, str]:
    """Key of each parameter, or its `id`, -> the script's name for it, if its variables have one."""
    keys = {id(parameter): id(parameter) if is_by_id else key for key, parameter, *_ in replicated.rows()}
    named: dict[Any, str] = {}
    modules = dict(modules_in(frame))
    for variable, module in modules.items():
        for name, parameter in parameters_of(module):
            if id(parameter) in keys:
                named.setdefault(keys[id(parameter)], name if len(modules) == 1 else f"{variable}.{name}")
    for variable, tensor in _tensors_in(frame):
        if id(tensor) in keys:
            named.setdefault(keys[id(tensor)], variable)
    return named


def reduced_over_all() -> Iterator[torch.Tensor]:
    """Parameters whose gradients DistributedDataParallel averages over all ranks."""
    for model in optimizer_registry.wrapped_models():
        if model.process_group.size() == torch.distributed.get_world_size():
            yield from optimizer_registry.reduced_by(model)


def _hash(tensor: torch.Tensor) -> str:
    local = local_of(tensor)
    hasher = xxhash.xxh3_64(f"{local.dtype} {list(local.shape)} {sharded.place_of(tensor)}".encode())
    hasher.update(content_of(local))
    return hasher.hexdigest()


def _hash_of_rest(state: dict[str, Any], group: dict[str, Any], gradient: torch.Tensor | None) -> str:
    hasher = xxhash.xxh3_64()
    for name, value in (*sorted(group.items()), *replicated.flat(state)):
        if is_a(value, torch.Tensor):
            local = local_of(value)
            if _is_dense(local):
                hasher.update(f"{name} {local.dtype} {list(local.shape)}".encode())
                hasher.update(content_of(local))
        elif is_a(value, replicated.PLAIN) or (
            type(value) is tuple and all(is_a(item, replicated.PLAIN) for item in value)
        ):
            plain = tuple(map(plain_of, value)) if type(value) is tuple else plain_of(value)
            hasher.update(f"{name} {plain!r}".encode())
    if gradient is not None:
        gradient = local_of(gradient)
        parts = (gradient,) if _is_dense(gradient) else _parts_of_sparse(gradient)
        for part in parts:
            hasher.update(content_of(part))
    return hasher.hexdigest()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _parts_of_sparse(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if gradient.layout is not torch.sparse_coo:
        return ()
    whole = gradient.coalesce()
    return whole.indices(), whole.values()


def _some_bytes(tensor: torch.Tensor, boundary: int) -> bytes:
    """At most SAMPLE_BYTES of a tensor, from another place at each boundary; none if it is not contiguous."""
    if not (_is_dense(tensor) and tensor.is_cpu and tensor.is_contiguous()):
        return b""
    size = min(SAMPLE_BYTES, tensor.nbytes)
    return ctypes.string_at(tensor.data_ptr() + boundary * _STRIDE % (tensor.nbytes - size + 1), size) if size else b""


def _tensors_in(frame: FrameType | None) -> Iterator[tuple[str, torch.Tensor]]:
    for user_frame in user_frames(frame):
        for name, value in variables_of(user_frame).items():
            if is_a(value, torch.Tensor):
                yield name, value
            elif is_a(value, list | tuple):
                yield from (
                    (f"{name}[{at}]", item) for at, item in enumerate(items_of(value)) if is_a(item, torch.Tensor)
                )
            elif is_a(value, dict):
                yield from ((f"{name}[{at!r}]", item) for at, item in pairs_of(value) if is_a(item, torch.Tensor))
