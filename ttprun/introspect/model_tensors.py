"""All parameters of an optimizer (`all_of`), and a distributed tensor's part in this rank's memory (`local_of`).

An engine may step one parameter group after another: it puts a shorter list in the place of `param_groups`, as
DeepSpeed's ZeRO 1 and 2 do, or gives a group its parameters for the time of the step alone, as ZeRO 3 does. What is not
shown at the moment is state all the same: it is learnt, and shown again.

Distributed tensors are DTensors, and FSDP1's and FSDP2's parameters. Which part of the whole that is:
tensors/sharded.py.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from ttprun.introspect.ownership import variable_of
from ttprun.introspect.safe_reads import dictionary_of, is_a

# The parts and tensors of a module, read without its own methods, which a class may override.
#
# Names are those of torch's `named_modules` and `named_parameters`.


_IN_C = ("_modules", "_parameters", "_buffers")


def tables_of(part: torch.nn.Module) -> dict[str, Any]:
    """The attributes that a module itself holds, among them `_modules`, `_parameters` and `_buffers`.

    One that torch.jit has compiled keeps those three in C++, and what it answers about them is a copy.
    """
    attributes = dictionary_of(part) or {}
    if not is_a(part, torch.jit.ScriptModule):
        return attributes
    attributes = dictionary_of(attributes.get("_actual_script_module", part)) or {}  # a traced one is a shell around it
    return attributes | {name: dict(attributes[name].items()) for name in _IN_C if name in attributes}


def parts_of(root: torch.nn.Module, with_repeated: bool = False) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of a module and all inside it.

    with_repeated   one that is there several times comes each time
    """
    met: set[int] = set()
    pending = [("", root)]
    while pending:
        path, part = pending.pop()
        if id(part) in met and not with_repeated:
            continue
        met.add(id(part))
        yield path, part
        inner = tables_of(part).get("_modules", {})
        within = [(f"{path}.{name}" if path else name, child) for name, child in inner.items() if child is not None]
        pending += reversed(within)


def parameters_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of all of a module's; one that is there several times comes once."""
    met: set[int] = set()
    for path, part in parts_of(root):
        for name, parameter in tables_of(part).get("_parameters", {}).items():
            if parameter is not None and id(parameter) not in met:
                met.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


class Group(NamedTuple):
    """A parameter group.

    settings     its dict, as in `param_groups`
    parameters   all that belong to it
    """

    settings: dict[str, Any]
    parameters: list[torch.Tensor]


class _Known:
    """What an optimizer was seen with.

    dicts   the list that was its `param_groups` when it was shown all
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.dicts = optimizer.param_groups
        self.groups = [Group(settings, settings["params"]) for settings in self.dicts]

    def is_shown(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is shown just this; plain loops, as it is asked at each boundary."""
        dicts = optimizer.param_groups
        if dicts is not self.dicts or len(dicts) != len(self.groups):
            return False
        for settings, group in zip(dicts, self.groups, strict=True):
            if settings is not group.settings or settings["params"] is not group.parameters:
                return False
        return True

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is shown something else than before: a part, or more."""
        ids = set(map(id, self.dicts))
        shown = optimizer.param_groups
        if len(shown) >= len(self.dicts) or any(id(settings) not in ids for settings in shown):
            self.dicts = shown
        before = {id(group.settings): group.parameters for group in self.groups}
        state = optimizer.state
        self.groups = [
            Group(settings, _joined(before.get(id(settings), []), settings["params"], state)) for settings in self.dicts
        ]


def _joined(earlier: list[torch.Tensor], shown: list[torch.Tensor], state: Any) -> list[torch.Tensor]:
    """The parameters of a group: those shown, and of the known ones those that have not been given up."""
    if shown is earlier or not shown:
        return earlier
    ids, ids_earlier = set(map(id, shown)), set(map(id, earlier))
    if ids & ids_earlier and ids - ids_earlier:  # the list was edited
        return shown
    hidden = [parameter for parameter in earlier if id(parameter) not in ids and parameter in state]
    if not hidden:
        return shown
    kept = set(map(id, hidden)) | ids
    return [
        *(parameter for parameter in earlier if id(parameter) in kept),
        *(parameter for parameter in shown if id(parameter) not in ids_earlier),
    ]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def shown_to(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that it would step now."""
    for group in optimizer.param_groups:
        yield from group["params"]


def how_many_shown(optimizer: torch.optim.Optimizer) -> list[int | None]:
    """Of each group of `all_of`, how many parameters are shown; None: the group itself is not."""
    shown = {id(group): len(group["params"]) for group in optimizer.param_groups}
    return [shown.get(id(group.settings)) for group in all_of(optimizer)]


def all_of(optimizer: torch.optim.Optimizer) -> list[Group]:
    """All groups of an optimizer, the same list for as long as it is shown the same.

    A group that is not shown keeps its place among those that are. A group that shows none of its parameters, or some
    of them, or others, keeps those of which the optimizer has state; if it shows none, all.
    """
    entry = _known.get(optimizer)
    if entry is None:
        entry = _known[optimizer] = _Known(optimizer)
    elif not entry.is_shown(optimizer):
        entry.look(optimizer)
    return entry.groups


# The original parameters of FSDP1 (`use_orig_params=True`), which the optimizer has in place of flat ones.
#
# At a boundary each is a view of this rank's part of its flat parameter: as much of it as lies there, perhaps
# nothing. It is the whole while a script gathers parameters to look at or to save them (`summon_full_params`, a full
# `state_dict`). Then the part is still there, in the flat parameter.


# id of a parameter -> flat parameter, index there, whether each rank has the whole
_flat_parts: dict[int, tuple[weakref.ref[Any], int, bool]] = {}


def wrap_init(original: Any) -> Any:
    """FlatParamHandle.__init__: note of which flat parameter the original ones are parts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        flat = getattr(self, "flat_param", None)
        for at, parameter in enumerate(getattr(flat, "_params", None) or ()):
            if type(parameter) is torch.nn.Parameter:
                _flat_parts[id(parameter)] = weakref.ref(flat), at, not self.uses_sharded_strategy

    return init


def part_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of an original parameter; None if it is none.

    returns  one dimension, as many elements as this rank has, in the flat parameter's memory; the parameter itself
             where each rank has the whole (NO_SHARD), and before the first forward pass
    """
    entry = _flat_parts.get(id(parameter))
    if entry is None:
        return None
    of_flat, at, is_whole = entry
    flat = of_flat()
    if flat is None or id(flat._params[at]) != id(parameter):  # another one with the id of one that is gone
        return None
    shard = getattr(flat, "_local_shard", None)
    if is_whole or shard is None:
        return parameter
    info = flat._shard_param_infos[at]
    begin, size = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
    part: torch.Tensor = shard[begin : begin + size]
    return part


def forget() -> None:
    """The run of the script is over."""
    _flat_parts.clear()


_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_OF_FSDP1 = {
    "torch.distributed.fsdp._flat_param": "_all_gather_flat_param",
    "torch.distributed.fsdp._runtime_utils": "_reduce_grad",
}


_FRAMES_TO_COLLECTIVES = 12  # from a process group's operation to its caller, through torch's wrappers


def kind() -> type | None:
    """The class of sharded tensors; None if it is not imported, so that there can be none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, sharded or not."""
    of = type(tensor)
    return of is not torch.nn.Parameter and of is not torch.Tensor and _is_of_kind(of)


@functools.cache
def _is_of_kind(of: type) -> bool:
    """Whether a class is that of sharded tensors, or made of it: known for good, as no base is imported after it."""
    base = kind()
    return base is not None and issubclass(of, base)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this rank's memory; the tensor itself if it is neither a DTensor nor one of FSDP1's.

    tensor   any dtype, shape and device
    """
    if not is_distributed(tensor):
        return waited_for(at_rest(tensor))
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local if type(local) is torch.Tensor else waited_for(local)


def at_rest(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter as it is at a boundary: one of FSDP1 may be the whole while a module computes."""
    part: torch.Tensor | None = getattr(parameter, "_local_shard", None)
    if part is None:
        part = part_of(parameter)
    return parameter if part is None else part


def is_gathered_in_place(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 may have the whole in a parameter's place, and its part cannot be had then."""
    return (
        bool(getattr(parameter, "_fsdp_flattened", False))
        and getattr(parameter, "_local_shard", None) is None
        and part_of(parameter) is None
    )


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, which a tensor without memory of its own stands for until it is used."""
    if type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor:
        return tensor
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def are_any(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    return kind() is not None and any(map(is_distributed, tensors))


def fsdp_caller() -> tuple[FrameType | None, bool]:
    """The frame of FSDP's own collectives that issues the current one, and whether it alone knows the tensors.

    None: FSDP has not issued it, to gather parameters or to reduce gradients. Its results are not kept for a replay,
    however small: there are many in each step, and a repair replaces them. What a reduction reads is then a buffer that
    FSDP2 has put together for it alone, or a gradient that FSDP1 has let go of; not if code of the script's own lies in
    between (`set_custom_reduce_scatter`), as that allocates the buffer, too.
    """
    frame: FrameType | None = sys._getframe(1)
    is_alone = True
    for _ in range(_FRAMES_TO_COLLECTIVES):
        if frame is None:
            break
        try:
            name = frame.f_globals["__name__"]
        except KeyError:
            name = ""
        if name == _COLLECTIVES or (name in _OF_FSDP1 and frame.f_code.co_name == _OF_FSDP1[name]):
            return frame, is_alone
        dotted = f"{name}."  # and no call, as this is done at each collective
        is_alone = is_alone and (dotted[:6] == "torch." or dotted[:7] == "ttprun.")
        frame = frame.f_back
    return None, False


def gathered_by(frame: FrameType) -> list[Any]:
    """What this frame gathers or reduces: parameters, of FSDP2's class for them; FSDP1's handle of a flat one; []."""
    if frame.f_globals["__name__"] in _OF_FSDP1:
        return [variable_of(frame, "self")]
    for caller in (frame, frame.f_back):  # releases differ in whether a function of the same module calls the group
        if caller is not None and caller.f_code.co_name in ("foreach_all_gather", "foreach_reduce"):
            return variable_of(caller, caller.f_code.co_varnames[0])  # type: ignore[no-any-return]
    return []
