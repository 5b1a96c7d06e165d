"""The replicated state: the optimizers' parameters and their state, described, hashed and loaded.

The order is the same in every rank: optimizers in the order of their making, their groups, the groups' parameters, of
each the weights and then the optimizer's state by name. Each tensor has a key made of these.

A sharded tensor (sharded.py) is described as a whole, which is the same everywhere; each rank has its own part of the
elements, which is not hashed here.

A replacement begins after the newest step with a survivor's weights, and repeats what the script does from there on. If
that changes weights (averaged ones replace them for validation, they are scaled or clipped by hand, a best state is
loaded), a survivor in the middle of a step no longer holds what the replacement needs. So a change is looked for before
each step; after the first one, a copy is made after each step (`PostStepWeights`). A change shows in the tensors'
version counters, except through `.data`: hence the hash of a part of one parameter, another one at each step, and of
all of them after the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import msgpack
import torch
import xxhash

from ttprun.device import interface
from ttprun.introspect import host_copies, model_tensors
from ttprun.introspect.current_rank import current
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.safe_reads import is_a
from ttprun.introspect.tensor_bytes import content_of
from ttprun.protocol.reason import Reason
from ttprun.state.chunks import Chunk
from ttprun.tensors import gradients, optimizer_registry, sharded
from ttprun.tensors.gradients import GRADIENT
from ttprun.tensors.optimizer_registry import Stepped, hash_of

PLAIN = (int, float, bool, str, type(None))
WEIGHT = "weight"


class Part(NamedTuple):
    """This rank's part of one tensor.

    tensor  the elements in this rank's memory
    whole   as the script has it; it may be sharded
    """

    key: str
    tensor: torch.Tensor
    whole: torch.Tensor

    @property
    def place(self) -> str | None:
        """Which part it is; None: all of it."""
        return sharded.place_of(self.whole)

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient, which may be a rank's own."""
        return self.key.endswith(f"/{GRADIENT}")

    @property
    def chunk(self) -> Chunk | None:
        """Its elements' place in the whole tensor, if it can be stored; None: all of it."""
        return sharded.chunk_of(self.whole)


def key_of(optimizer: int, group: int, index: int) -> str:
    """The key of a parameter, the same in all ranks.

    optimizer   number of its optimizer in `optimizer_registry.optimizers()`
    group       number of its parameter group there
    index       in this group
    """
    return f"optimizer.{optimizer}/{group}.{index}"


def parameter_of(key: str) -> str:
    """The key of the parameter to which a tensor belongs."""
    return key.rpartition("/")[0]


Row = tuple[str, torch.Tensor, dict[str, Any], dict[str, Any], torch.optim.Optimizer]


def rows() -> Iterator[Row]:
    """(key, parameter, its state, its group, its optimizer) of all parameters.

    To the state belongs the gradient, if it is kept: the script adds to it (gradients.py).
    """
    for number, optimizer in enumerate(optimizer_registry.optimizers()):
        kept = gradients.kept_of(optimizer)
        for group_number, group in enumerate(model_tensors.all_of(optimizer)):
            for index, parameter in enumerate(group.parameters):
                key = key_of(number, group_number, index)
                state = optimizer.state.get(parameter, {})
                if id(parameter) in kept:
                    state = {**state, GRADIENT: kept[id(parameter)]}
                yield key, parameter, state, group.settings, optimizer


def live_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizers' tensors now, with keys; some may be sharded. (`describe` is about the newest boundary.)"""
    for name, parameter, state, _, _ in rows():
        yield f"{name}/{WEIGHT}", model_tensors.at_rest(parameter).detach()
        yield from ((f"{name}/{key}", value.detach()) for key, value in flat(state) if is_a(value, torch.Tensor))


def flat(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """An optimizer's state of one parameter, by name; the items of a list follow it."""
    for key, value in state.items():
        yield from _with_items(key, value)


def _with_items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield key, value
    if type(value) is list:
        for number, item in enumerate(value):
            yield from _with_items(f"{key}.{number}", item)


def keys_of_parameters() -> dict[int, str]:
    """By its id, the key of each parameter's weights."""
    return {id(parameter): f"{name}/{WEIGHT}" for name, parameter, *_ in rows()}


def describe() -> tuple[list[Any], list[Part]]:
    """This rank's state of the newest boundary: the weights as the optimizer has left them there.

    returns  for each parameter [dtype, shape, [[name, is a tensor, dtype or value, shape] of its state]], and this
             rank's parts of all tensors; the value of a list is [its length], and its items follow

    Raises NotRepairableError.
    """
    header: list[Any] = []
    parts: list[Part] = []
    session = current()
    kept = None if session is None else session[PostStepWeights]
    if kept is not None and kept.why_not():
        raise NotRepairableError(kept.why_not())
    for name, parameter, state, _, _ in rows():
        entries = []
        entries_held = list(flat(state))
        why_not = sharded.why_not_held((parameter, *(value for _, value in entries_held if is_a(value, torch.Tensor))))
        if why_not:
            raise NotRepairableError(why_not)
        weight = model_tensors.local_of(parameter) if kept is None else kept.of(parameter)
        parts.append(Part(f"{name}/{WEIGHT}", weight.detach(), parameter))
        for key, value in entries_held:
            if is_a(value, torch.Tensor):
                if value.layout is not torch.strided:
                    raise NotRepairableError(
                        Reason("optimizer-state-unknown", f"{name} has state '{key}', which is a sparse tensor")
                    )
                entries.append([key, True, str(value.dtype)[6:], list(value.shape)])
                parts.append(Part(f"{name}/{key}", model_tensors.local_of(value).detach(), value))
            elif is_a(value, PLAIN):
                entries.append([key, False, value, None])
            elif type(value) is list:
                entries.append([key, False, [len(value)], None])
            else:
                raise NotRepairableError(
                    Reason("optimizer-state-unknown", f"{name} has state '{key}' of type {type(value).__name__}")
                )
        header.append([str(parameter.dtype)[6:], list(model_tensors.at_rest(parameter).shape), entries])
    return header, parts


def without_gradients(header: list[Any]) -> list[Any]:
    """What `describe` returns without kept gradients: a rank may keep none where others do."""
    return [[dtype, shape, [entry for entry in state if entry[0] != GRADIENT]] for dtype, shape, state in header]


def digest() -> str:
    """A hash of all state but sharded tensors and gradients: the same in ranks that hold other parts.

    Raises NotRepairableError.
    """
    header, parts = describe()
    state = xxhash.xxh3_64(msgpack.packb(without_gradients(header)))
    for part in parts:
        if part.place is None and not part.is_gradient:
            state.update(content_of(part.tensor))
    return state.hexdigest()


def digest_of_shards() -> str:
    """A hash of this rank's parts of sharded tensors, and of kept gradients. Raises NotRepairableError."""
    state = xxhash.xxh3_64()
    for part in describe()[1]:
        if part.place is not None or part.is_gradient:
            state.update(f"{part.key} {part.place}".encode())
            state.update(content_of(part.tensor))
    return state.hexdigest()


def digests() -> dict[str, str]:
    """Key of each parameter that is not sharded -> digest of its weights and its optimizer state.

    Raises NotRepairableError.
    """
    hashers: dict[str, Any] = {}
    for part in describe()[1]:
        if part.place is None and not part.is_gradient:
            of_parameter = hashers.setdefault(parameter_of(part.key), xxhash.xxh3_64())
            of_parameter.update(f"{part.key} {part.tensor.dtype} {list(part.tensor.shape)}".encode())
            of_parameter.update(content_of(part.tensor))
    return {key: of_parameter.hexdigest() for key, of_parameter in hashers.items()}


def keys() -> list[str]:
    """Of all parameters, in the order of `describe`."""
    return [name for name, *_ in rows()]


def take_over(header: list[Any], fill: Callable[[str, torch.Tensor], None], is_stored: bool = False) -> None:
    """Load the state that another rank has described, and mark it as safe for the device.

    header  from `describe`
    fill    called with the key of each tensor, in that order, and with the tensor (maybe sharded) to write to
    is_stored   it was described in a checkpoint or snapshot

    Raises NotRepairableError if this rank's parameters differ from those.
    """
    device = interface.current()
    gradients.begin_load()
    own = list(rows())
    if len(own) != len(header):
        raise NotRepairableError(
            Reason("other-weights", f"this rank's optimizers have {len(own)} parameters, and the source {len(header)}")
        )
    for (name, parameter, _, _, optimizer), (dtype, shape, entries) in zip(own, header, strict=True):
        if list(parameter.shape) != shape or str(parameter.dtype)[6:] != dtype:
            own_shape = list(parameter.shape)
            if is_stored:
                raise NotRepairableError(
                    Reason(
                        "resume-with-another-model",
                        f"{name} is {own_shape} in the script's model, and {shape} in what was saved",
                    )
                )
            raise NotRepairableError(
                Reason("other-weights", f"{name} has shape {own_shape}, and the source's has {shape}")
            )
        fill(f"{name}/{WEIGHT}", parameter.detach())
        device.mark_safe(parameter)
        if not entries:
            optimizer.state.pop(parameter, None)
            continue
        old = optimizer.state[parameter]
        new: dict[str, Any] = {}
        remaining = iter(entries)
        for entry in remaining:
            new[entry[0]] = _take_over_state(name, parameter, old.get(entry[0]), entry, remaining, fill)
        gradient = new.pop(GRADIENT, None)
        if gradient is not None:
            gradients.load(optimizer, parameter, gradient)
        if not new:
            optimizer.state.pop(parameter, None)
            continue
        old.clear()
        old.update(new)


def take_over_parts(
    header: list[Any], places: Sequence[str | None], whose: str, fill: Callable[[torch.Tensor], None]
) -> None:
    """Load what another process has described, which must have had the same parts of sharded tensors.

    header   as for `take_over`
    places   of its tensors, as in `Part.place`
    whose    these are, for people
    fill     called with this rank's part of each tensor, in that order, to write to

    Raises NotRepairableError.
    """
    remaining = iter(places)

    def fill_part(key: str, tensor: torch.Tensor) -> None:
        if (place := sharded.place_of(tensor)) != (theirs := next(remaining)):
            said = f"{key}: this rank's part is {place}, and {whose} {theirs}"
            raise NotRepairableError(Reason("sharding-unknown", said))
        fill(local_of(tensor))

    take_over(header, fill_part)


def _take_over_state(
    name: str,
    parameter: torch.Tensor,
    old: Any,
    entry: list[Any],
    remaining: Iterator[list[Any]],
    fill: Callable[[str, torch.Tensor], None],
) -> Any:
    """One value of a parameter's state, as `entry` describes it.

    old        the present value; a tensor of the right form is written to
    remaining  the entries after it: a list's items are taken from there
    """
    key, is_tensor, value, shape = entry
    if is_tensor:
        kind = getattr(torch, value)
        if not isinstance(old, torch.Tensor) or old.dtype != kind or list(old.shape) != shape:
            if model_tensors.is_distributed(parameter) and shape:
                # As optimizers make it; who fills it compares which part of the whole it is.
                if shape != list(parameter.shape):
                    raise NotRepairableError(
                        Reason(
                            "optimizer-state-unknown",
                            f"{name} has no '{key}' here, and it is unknown whether it is sharded",
                        )
                    )
                old = torch.zeros_like(parameter.detach(), dtype=kind)
            else:
                # A step's count is kept on the CPU, and what is as large as the parameter beside it.
                device = old.device if isinstance(old, torch.Tensor) else parameter.device if shape else None
                old = torch.empty(shape, dtype=kind, device=device)
        fill(f"{name}/{key}", old)
        interface.current().mark_safe(old)
        return old
    if type(value) is not list:
        return value
    items = [*(old if type(old) is list else []), *[None] * value[0]]
    return [_take_over_state(name, parameter, items[at], next(remaining), remaining, fill) for at in range(value[0])]


FULL_LOOKS = 2


class PostStepWeights:
    """This process's weights after the newest step.

    trained   called after each step
    report    called once, with a note for the operator, when copies begin
    is_kept   copies are made
    """

    def __init__(self, trained: Callable[[], Stepped], report: Callable[[str], None]) -> None:
        self._trained = trained
        self._report = report
        self._copies: dict[int, torch.Tensor] = {}
        self.is_kept = False
        self._looks = 0
        # After the newest step:
        self._noted: Sequence[torch.Tensor] = ()
        self._versions: int | None = None
        self._mark: torch.Tensor | bytes = b""
        self._digest = b""

    def note(self, boundary: int) -> None:
        """The step to `boundary` has ended."""
        trained = self._trained()
        weights = trained.weights
        if self.is_kept:
            self._copy(weights)
            return
        self._noted = weights
        self._versions = sum(map(_version_of, weights))
        self._mark = trained.sample_later(boundary + 1)
        if self._looks < FULL_LOOKS:
            self._looks += 1
            self._digest = _digest_of(weights)
        else:
            self._digest = b""

    def forget(self) -> None:
        """The run of the script is over: drop its tensors."""
        self._noted, self._versions = (), None
        self._copies.clear()

    def compare(self, trained: Stepped, mark: bytes) -> None:
        """Before the next step: find out whether the script has changed weights since the previous one.

        trained   what the next step updates
        mark      the sample for the boundary to which it leads
        """
        if self.is_kept or self._versions is None:
            return
        weights = trained.weights
        if not (self._is_changed() or (mark != self._mark and _are_same(weights, self._noted))):
            return
        self.is_kept = True
        size = sum(local_of(weight).nbytes for weight in weights)
        self._report(
            f"the script changes weights between its optimizer's steps: {size / (1 << 20):.1f} MiB are copied after "
            "each step from now on, to repair a rank that is lost in between"
        )

    def compare_later(self, trained: Stepped, boundary: int, use: Callable[[bytes], None]) -> None:
        """As `compare`, with the next `host_copies.take`; `use` is called with the sample then."""
        now, then = trained.sample_later(boundary), self._mark

        def compare(copies: list[torch.Tensor]) -> None:
            hashes = iter(map(hash_of, copies))
            mark, self._mark = (sample if isinstance(sample, bytes) else next(hashes) for sample in (now, then))
            self.compare(trained, mark)
            use(mark)

        host_copies.later([sample for sample in (now, then) if not isinstance(sample, bytes)], compare)

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the newest step has left it; of a sharded one, this rank's part."""
        return local_of(self._copies.get(id(weight), weight))

    def why_not(self) -> Reason:
        """Why `of` does not know; "" if it does."""
        if self._copies or self._versions is None or not (self.is_kept or self._is_changed()):
            return Reason()
        return Reason(
            "not-compared-yet",
            "the script has changed weights since its optimizer's step, for the first time, and there is no copy yet",
        )

    def _is_changed(self) -> bool:
        noted = self._noted
        return self._versions != sum(map(_version_of, noted)) or bool(
            self._digest and self._digest != _digest_of(noted)
        )

    def _copy(self, weights: Sequence[torch.Tensor]) -> None:
        copies = self._copies
        if copies.keys() != set(map(id, weights)):
            copies = {id(weight): torch.empty_like(local_of(weight), requires_grad=False) for weight in weights}
        for weight in weights:
            copies[id(weight)].copy_(local_of(weight).detach())
        self._copies = copies


_version_of = attrgetter("_version")


def _are_same(weights: Sequence[torch.Tensor], noted: Sequence[torch.Tensor]) -> bool:
    """False if parameters have been added or removed."""
    return len(weights) == len(noted) and all(map(is_, weights, noted))


def _digest_of(weights: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_64()
    for weight in weights:
        state.update(content_of(local_of(weight).detach()))
    return state.digest()
