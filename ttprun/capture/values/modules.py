"""Modules: the tensors that no optimizer updates, what is frozen or in evaluation, and attributes. And optimizers.

What hardly ever changes of a module (its parts, the shapes of its tensors, `training`, `Dropout.p`) is packed once into
the description, and only looked at again at each boundary; attributes that have changed, or can change by themselves,
are recorded each time. All parts and tensors get numbers in the order of the description, the module itself first. Of
an optimizer the hyper-parameters are recorded, and what a class of the user's keeps beside them; its state comes from a
peer, as the trained weights do.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from ttprun import frameworks
from ttprun.capture.records.nodes import AnyNode, ModuleNode, Number, OptimizerNode, RefusedNode, SameNode, WrapperNode
from ttprun.capture.records.packing import (
    MISSING,
    SETTLED,
    ModuleDescription,
    is_settled,
    name_of,
    pack,
    unpack_description,
)
from ttprun.capture.values.autograd_graphs import forget_gradient
from ttprun.capture.values.changes import ARE_COUNTED, Piece, Remembered, version_of
from ttprun.capture.values.kept import lasting_numbers
from ttprun.capture.values.objects import left_out_by_framework, made_when_needed, restore_attributes
from ttprun.capture.values.plain import BASES
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.introspect.model_tensors import all_of, how_many_shown, is_distributed, local_of, parts_of, tables_of
from ttprun.introspect.safe_reads import bases_of, dictionary_of_class, is_a, module_of_class, of_types
from ttprun.introspect.tensor_bytes import plain

_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
# Of these packages' modules, what their own code keeps in attributes is made by it again (the padding of a convolution,
# the names of an LSTM's weights, ...), but for tensors.
_CONSTANT = ("torch.nn.", "torch.ao.", "torchvision.")
# Modules that wrap one other module for the time of the run; what else they hold is made by the replay.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
# ... but for this: hooks of DistributedDataParallel's, which may have a state of their own.
_OF_WRAPPERS = ("_comm_hooks",)
# FSDP2 gives each module that it shards a class of its own, made of the module's; so does a parametrization.
_DERIVING = ("torch.distributed.fsdp._fully_shard.", "torch.nn.utils.parametrize")
_DERIVED = ("torch.distributed.fsdp", "torch.nn.utils.parametrize")
# What torch.distributed puts into a module for itself; the rest of the name is another one in each process.
_COMPOSABLE = "__composable_api_state_key_"
_CAN_SETTLE: tuple[Any, ...] = (
    *SETTLED,
    bytes,
    tuple,
    frozenset,
    types.FunctionType,
    types.BuiltinFunctionType,
    *(base for base, _ in BASES),
)


def _is_of(module: torch.nn.Module, packages: tuple[str, ...]) -> bool:
    where = module_of_class(type(module))
    if where.startswith(_DERIVING):
        where = next(name for name in map(module_of_class, bases_of(type(module))) if not name.startswith(_DERIVED))
    return where.startswith(packages)


@of_types
def _made_by_itself(kind: type) -> frozenset[str]:
    """Names of the attributes that the code of a library's module sets."""
    return frozenset(
        step.argval
        for base in bases_of(kind)
        for function in dictionary_of_class(base).values()
        if isinstance(function, types.FunctionType)
        for step in dis.get_instructions(function)
        if step.opname == "STORE_ATTR"
    )


class _ModeOfCompiled(Mapping[str, Any]):
    """`training` of a module that torch.jit has compiled, which keeps it in C++; nothing else of it is recorded."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        self._part = part

    def __getitem__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __iter__(self) -> Iterator[str]:
        return iter(("training",))

    def __len__(self) -> int:
        return 1


class _Layout:
    """What of a module is as it was at the boundary before.

    modules    (path, module) of the parts that are recorded here
    elsewhere  ids of the other parts and tensors, which are recorded with another variable
    moving     (path, attributes, names) to record at each boundary
    settled    (attributes, how to take their settled ones) of each part that has any
    tensors    those that no optimizer updates
    packed     the description
    first_number   of the objects in it, one after the other
    """

    def __init__(self, root: torch.nn.Module, snapshot: Snapshot, lively: dict[str, set[str]]) -> None:
        self.root = root
        self.stepped = snapshot.stepped
        self.lively = lively
        parts = list(parts_of(root))
        self.modules = [(path, part) for path, part in parts if id(part) not in snapshot.numbers]
        self.elsewhere = {id(part) for _, part in parts if id(part) in snapshot.numbers}
        self.objects: list[Any] = [part for _, part in self.modules]
        self.tensors: list[torch.Tensor] = []
        self.sharded: list[str] = []
        self._met: set[int] = set()
        self.parameters: list[torch.nn.Parameter] = []
        self.moving: list[tuple[str, Mapping[str, Any], list[str]]] = []
        self.settled: list[tuple[dict[str, Any], Callable[[Any], Any]]] = []
        hook_tables = _hook_tables(part for _, part in self.modules)
        self.scopes = [tables_of(part) for _, part in self.modules]
        self.versions, self.lengths = list(map(version_of, self.scopes)), list(map(len, self.scopes))
        described = ModuleDescription(
            modules=[[path, name_of(type(part))] for path, part in self.modules],
            tensors=[row for path, part in self.modules for row in self._tensors(path, part, snapshot)],
            sharded=self.sharded,
            frozen=[parameter.requires_grad for parameter in self.parameters],
            hooks=_count_hooks(hook_tables, self.parameters),
            passing=[_dotted(path, name) for path, part in self.modules for name in part._non_persistent_buffers_set],
            attributes={path: self._attributes(path, part, snapshot) for path, part in self.modules},
        )
        self.held = list(map(local_of, self.tensors))
        self.objects += self.tensors
        self.ids = list(map(id, self.objects))
        self.id_set = frozenset(self.ids)
        self.first_number = Number(lasting_numbers(len(self.ids)))
        self.values = self.settled_values()
        self.learnt = list(map(_HOOKED, self.parameters))
        of_parameters = [table for _, *tables in self.learnt for table in tables if table is not None]
        of_parts = [scope[name] for scope in self.scopes for name in ("_modules", "_parameters", "_buffers")]
        self.structure = Piece([*of_parts, *hook_tables, *of_parameters])
        self.packed = pack(described)

    def _tensors(self, path: str, part: torch.nn.Module, snapshot: Snapshot) -> list[tuple[str, list[int]]]:
        rows = []
        tables = tables_of(part)
        self.parameters += [item for item in tables["_parameters"].values() if item is not None]
        for where in ("_buffers", "_parameters"):
            for name, tensor in tables[where].items():
                if tensor is None or (
                    tensor.layout is torch.strided and local_of(tensor).untyped_storage().data_ptr() in snapshot.stepped
                ):
                    continue
                if id(tensor) in snapshot.numbers:
                    self.elsewhere.add(id(tensor))
                    continue
                if id(tensor) not in self._met:
                    self._met.add(id(tensor))
                    self.tensors.append(tensor)
                    full_name = _dotted(path, name)
                    rows.append((full_name, list(tensor.shape)))
                    if is_distributed(tensor):
                        self.sharded.append(full_name)
        return rows

    def _attributes(self, path: str, part: torch.nn.Module, snapshot: Snapshot) -> dict[str, Any]:
        """Nodes of the settled attributes; notes where they and the others are."""
        if is_a(part, torch.jit.ScriptModule):
            self.moving.append((path, _ModeOfCompiled(part), ["training"]))
            return {}
        without = left_out_by_framework(type(part))
        own = [name for name in part.__dict__ if name not in _INTERNALS and not name.startswith(_COMPOSABLE)]
        if _is_of(part, _WRAPPERS):
            own = [name for name in own if name == "training"]  # torch.compile's asks the module in it, a further part
        names = [name for name in own if name not in without]
        made = _made_by_itself(type(part)) if _is_of(part, _CONSTANT) else ()
        lively = self.lively.get(path, set())
        nodes, moving = {}, []
        for name in names:
            value = part.__dict__[name]
            node = self._separate_node(value, snapshot) if is_a(value, _CAN_SETTLE) else RefusedNode()
            if name not in lively and is_settled(node):
                nodes[name] = node
            elif name in lively or name not in made or is_a(value, torch.Tensor):
                moving.append(name)
        if nodes:
            self.settled.append((part.__dict__, itemgetter(*nodes)))
        if moving:
            self.moving.append((path, part.__dict__, moving))
        return nodes

    def _separate_node(self, value: Any, snapshot: Snapshot) -> Any:
        """As `Snapshot.separate_node`; a function may hold the very module that is being described."""
        separate = Snapshot(snapshot.stepped, is_separate=True)
        separate.numbers = {id(part): number for number, part in enumerate(self.objects)}
        return separate.node(value, 0)

    def settled_values(self) -> list[Any]:
        """The settled attributes' values now."""
        return [take(attributes) for attributes, take in self.settled]

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether all is as it was; attributes that are not are recorded at each boundary from now on."""
        if self.stepped is not snapshot.stepped or not self.structure.holds():
            return False
        if not self.id_set.isdisjoint(snapshot.numbers) or not self.elsewhere <= snapshot.numbers.keys():
            return False
        if list(map(_HOOKED, self.parameters)) != self.learnt:
            return False
        versions = list(map(version_of, self.scopes))
        if ARE_COUNTED and versions == self.versions:
            return True
        if list(map(len, self.scopes)) != self.lengths:
            return False
        try:
            if all(map(_are_the_same, self.settled_values(), self.values)):
                self.versions = versions
                return True
        except Exception:  # an attribute is gone, or is something that cannot be compared now
            return False
        self._note_lively()
        return False

    def _note_lively(self) -> None:
        paths = {id(part.__dict__): path for path, part in self.modules}
        before = {id(attributes): value for (attributes, _), value in zip(self.settled, self.values, strict=True)}
        for attributes, take in self.settled:
            if not _are_the_same(take(attributes), before[id(attributes)]):
                path = paths[id(attributes)]
                nodes = unpack_description(self.packed).attributes[path]
                for name, node in nodes.items():
                    if name != "training" and (isinstance(node, AnyNode) or not _are_the_same(attributes[name], node)):
                        self.lively.setdefault(path, set()).add(name)


def _are_the_same(value: Any, other: Any) -> bool:
    """Whether two settled attributes are; what is of another kind by now is not asked."""
    if value is other or type(value) is not type(other):
        return value is other
    if type(value) is tuple:
        return len(value) == len(other) and (all(map(is_, value, other)) or all(map(_are_the_same, value, other)))
    return type(value) in SETTLED and bool(value == other)


def _hook_tables(parts: Iterable[torch.nn.Module]) -> list[dict[int, Any]]:
    return [
        table
        for part in parts
        for table in (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
    ]


def _count_hooks(tables: Iterable[dict[int, Any]], parameters: list[torch.nn.Parameter]) -> list[int]:
    """How many hooks there are on each part, by kind, and on each parameter (but for ours, which a replay leaves)."""
    of_parameters = [
        sum(not _is_ours(hook) for hook in (parameter._backward_hooks or {}).values()) for parameter in parameters
    ]
    of_gradients = [len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) for parameter in parameters]
    return [*map(_count_in, tables), *of_parameters, *of_gradients]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("ttprun.")


def _count_in(table: dict[int, Any]) -> int:
    names = [f"{getattr(hook, '__module__', '')}:{getattr(hook, '__qualname__', '')}" for hook in table.values()]
    repeated = frameworks.HOOKS_THAT_REPEAT.intersection(names)
    return len(repeated) + sum(name not in repeated and name not in frameworks.HOOKS_WHEN_NEEDED for name in names)


def _first_other(described: ModuleDescription, hooks: list[int]) -> str:
    """The path of the first part on which the numbers of hooks differ; "" if it is on a parameter."""
    kinds = 4
    of_parts = [
        tuple(counts[i : i + kinds] for counts in (described.hooks, hooks)) for i in range(0, len(hooks), kinds)
    ]
    paths = [path for path, _ in described.modules]
    return next((path for path, (lost, here) in zip(paths, of_parts, strict=False) if lost != here), "")


# Of a parameter: whether it is learnt, and its hooks, each None if it never had any.
_HOOKED: Any = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_layouts: Remembered[_Layout] = Remembered()  # by the module's id: a layout holds its module


def record_module(snapshot: Snapshot, value: torch.nn.Module, depth: int) -> Any:
    """A module with all its parts, those left out that were met before.

    value   its buffers, and weights that no optimizer updates, become blobs; any dtype, shape and device
    """
    layout = _layouts.get(id(value))
    if layout is None and _is_of(value, _WRAPPERS) and len(value._modules) == 1:
        (inner,) = value._modules.values()
        number = snapshot.number(value)
        wrapped = snapshot.node(inner, depth + 1)
        own = {name: snapshot.node(item, depth + 1) for name in _OF_WRAPPERS if (item := vars(value).get(name))}
        return WrapperNode(number, name_of(type(value)), value.training, own, wrapped)
    if layout is None or not layout.holds(snapshot):
        layout = _Layout(value, snapshot, layout.lively if layout is not None else {})
        _layouts.keep(id(value), layout)
    first_number = layout.first_number
    snapshot.numbers.update(zip(layout.ids, range(first_number, first_number + len(layout.ids)), strict=True))
    snapshot.alive += (layout, value)
    first = len(snapshot.blobs)
    snapshot.blobs += [plain(tensor) if tensor.is_cpu else tensor for tensor in layout.held]
    attributes = {
        path: snapshot.lasting_attributes(snapshot.names_of(scope, only=names), scope, depth)
        if type(scope) is dict
        else {name: snapshot.node(scope[name], depth + 1) for name in names if name in scope}
        for path, scope, names in layout.moving
    }
    return ModuleNode(first_number, name_of(type(value)), layout.packed, attributes, first)


def record_traced(snapshot: Snapshot, value: torch.jit.ScriptModule, depth: int) -> Any:
    """A module that torch.jit has compiled: it shares its tensors with the one that it was made of, or they stay."""
    tensors = [*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value)]
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if places <= snapshot.stepped.keys() | snapshot.storages.keys():
        return SameNode(name_of(type(value)), "")
    return snapshot.unproved(type(value), "its weights are not recorded")


def restore_wrapper(restore: Restore, live: Any, node: WrapperNode, name: str) -> Any:
    """Write what it wraps."""
    if not isinstance(live, torch.nn.Module) or name_of(type(live)) != node.kind:
        return restore.refuse(live, unlike(name, node.kind, live))
    if restore.claim_or_refuse(node.number, live, name):
        live.training = node.training
        (inner,) = live._modules.values()
        restore.value(inner, node.wrapped, name)
        restore_attributes(restore, live, node.own, name, keep=None)
    return live


def restore_module(restore: Restore, live: Any, node: ModuleNode, name: str) -> Any:
    """Write tensors and attributes into the replacement's module.

    live   refused unless it has the recorded type, and parts and tensors of the same paths, types and shapes
    """
    number, kind, attributes = node.number, node.kind, node.attributes
    described = unpack_description(node.description)
    if live is MISSING:
        live = made_when_needed(kind, attributes.get("", {}) | described.attributes.get("", {}))
    if not isinstance(live, torch.nn.Module) or name_of(type(live)) != kind:
        return restore.refuse(live, unlike(name, kind, live))
    parts = dict(parts_of(live))
    for offset, (path, part_kind) in enumerate(described.modules):
        if path not in parts or name_of(type(parts[path])) != part_kind:
            return restore.refuse(live, f"{_dotted(name, path)} of type {part_kind} is not in the replacement")
        if not restore.claim_or_refuse(number + offset, parts[path], _dotted(name, path)):
            return live
    first_tensor = number + len(described.modules)
    for offset, (path, shape) in enumerate(described.tensors):
        tensor = _tensor_at(parts, path)
        if tensor is None or list(tensor.shape) != shape:
            return restore.refuse(live, f"{name}.{path} of shape {shape} is not in the replacement")
        restore.claim(first_tensor + offset, tensor)
        _fill(tensor, restore.blob(node.first_blob + offset))
        if restore.is_comparing:
            forget_gradient(tensor)
    described_parts = [parts[path] for path, _ in described.modules]
    learnt = [item for part in described_parts for item in tables_of(part)["_parameters"].values() if item is not None]
    hooks = _count_hooks(_hook_tables(described_parts), learnt)
    if described.hooks != hooks:
        where = _first_other(described, hooks)
        restore.refuse(
            live,
            f"{_dotted(name, where)} has other hooks than in the lost rank, from steps that the replay passes over",
        )
    if len(learnt) != len(described.frozen):
        return restore.refuse(live, f"{name} has other parameters than in the lost rank")
    for parameter, requires_grad in zip(learnt, described.frozen, strict=True):
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
    for path, nodes in described.attributes.items():
        own = nodes | attributes.get(path, {})
        if is_a(parts[path], torch.jit.ScriptModule):
            parts[path].training = own["training"]
        else:
            restore_attributes(restore, parts[path], own, _dotted(name, path), keep=None)
    return live


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _tensor_at(parts: dict[str, torch.nn.Module], path: str) -> torch.Tensor | None:
    prefix, _, leaf = path.rpartition(".")
    owner = parts.get(prefix)
    tables = tables_of(owner) if owner is not None else {"_buffers": {}, "_parameters": {}}
    tensor: torch.Tensor | None = tables["_buffers"].get(leaf, tables["_parameters"].get(leaf))
    return tensor


def _fill(tensor: torch.Tensor, raw: memoryview) -> None:
    if len(raw):
        local = local_of(tensor)
        local.data.copy_(torch.frombuffer(bytearray(raw), dtype=local.dtype).reshape(local.shape))


_PARAMS = frozenset({"params"})


class _Empty(torch.optim.SGD):
    """An optimizer of nothing: to add a group would import Dynamo, which takes a second."""

    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


# What torch itself keeps in an optimizer; `step` is there if a scheduler has wrapped it.
_OF_OPTIMIZERS = frozenset(vars(_Empty([torch.zeros(1)], lr=0.1))) | {"step", "_opt_called", "_step_count"}


def record_optimizer(snapshot: Snapshot, value: torch.optim.Optimizer, depth: int) -> Any:
    """Hyper-parameters of each group, and attributes."""
    scope = vars(value)
    names = snapshot.names_of(scope, _OF_OPTIMIZERS)
    number = snapshot.number(value)
    settings = [group.settings for group in all_of(value)]
    groups = [snapshot.lasting_attributes(snapshot.names_of(group, _PARAMS), group, depth) for group in settings]
    own = snapshot.lasting_attributes(names, scope, depth)
    return OptimizerNode(number, name_of(type(value)), groups, how_many_shown(value), own)


def restore_optimizer(restore: Restore, live: Any, node: OptimizerNode, name: str) -> Any:
    """Write them into the replacement's optimizer."""
    groups = [group.settings for group in all_of(live)] if name_of(type(live)) == node.kind else []
    if not groups or len(groups) != len(node.groups) or how_many_shown(live) != node.shown:
        return restore.refuse(live, f"{name} is another optimizer than in the lost rank")
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    for group, recorded in zip(groups, node.groups, strict=True):
        for key, item in recorded.items():
            value = restore.value(group.get(key, MISSING), item, f"{name}.param_groups.{key}")
            if value is not MISSING:
                group[key] = value
        for key in group.keys() - recorded.keys() - _PARAMS:
            del group[key]
    restore_attributes(restore, live, node.attributes, name, keep=_OF_OPTIMIZERS)
    return live
