"""Read the plain values that a script keeps in its variables, and write them back in another process.

`Snapshot` walks from the variables of the user's frames through containers and objects, and turns what it finds into
nested lists that msgpack can pack. `Restore` walks the same names in the replacement and writes the values there. What
neither can do is named, never guessed: a value that a replay must have reproduced by itself (a large tensor of data) is
recorded as a fingerprint and compared; one that it cannot have reproduced (a large activation) is replaced by an object
that says so when it is used.

Nodes: a scalar is itself; everything else is [tag, ...]. Tags are the members of `Tag`.
"""

from __future__ import annotations

import enum
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ttprun.rank import loops, random_state
from ttprun.rank.frames import SCALARS, is_user_file, set_local
from ttprun.rank.tensor_bytes import bytes_of

SMALL_TENSOR_BYTES = 64 << 10
LONG_CONTAINER = 20_000
MAX_DEPTH = 8
_SAMPLE_BYTES = 4096
_INT64 = range(-(1 << 63), 1 << 64)


class Tag(enum.StrEnum):
    """Kinds of nodes."""

    OPAQUE = "?"  # reproduced by the replay, or of no interest
    REFERENCE = "r"  # an object seen before: [tag, number]
    BIG_INT = "i"  # [tag, decimal text]
    COMPLEX = "c"
    LIST = "l"  # [tag, number, items]
    TUPLE = "t"
    SET = "s"
    FROZENSET = "f"
    DEQUE = "q"
    DICT = "d"  # [tag, number, [[key, value], ...]]
    LONG = "L"  # a container too long to record: [tag, length]
    OBJECT = "o"  # [tag, number, class name, {attribute: node}]
    TENSOR = "T"  # [tag, number, dtype, shape, bytes]
    DATA = "D"  # a large tensor that the replay reproduces: [tag, dtype, shape, fingerprint]
    ACTIVATION = "A"  # a large tensor that depends on the weights: [tag, shape]
    BLOB = "B"  # a module's own tensor, in the record's blobs: [tag, number]
    MODULE = "m"  # [tag, number, [[name, node of a tensor]...], {attribute: node}]
    ARRAY = "n"  # small numpy array or scalar: [tag, dtype, shape, bytes, is_scalar]
    ARRAY_DATA = "N"
    GENERATOR_STATE = "g"  # a random generator's state: [tag, kind, state]
    OPTIMIZER = "O"  # [tag, number, [{hyper-parameter: node}...]]
    RUNNING = "G"  # a suspended Python generator of the user's: [tag, number, line, {variable: node}]


class CannotRestoreError(RuntimeError):
    """The replacement's variables do not fit the record; the message names the variable."""


class UnrecordedTensorError(RuntimeError):
    """The script uses a tensor of the step before that was too large to record."""


class Unrecorded:
    """Stands in a replacement for a large activation of the step that the lost rank had finished."""

    def __init__(self, name: str, shape: list[int]) -> None:
        object.__setattr__(self, "_told", f"{name} of shape {shape}")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__len__", "__iter__"):
            return object.__getattribute__(self, name)
        told = object.__getattribute__(self, "_told")
        raise UnrecordedTensorError(f"{told} is used after the optimizer step and is too large to record")

    def _refuse(self, *args: Any) -> Any:
        return self.shape

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _refuse
    __len__ = __iter__ = __float__ = __neg__ = __gt__ = __lt__ = __ge__ = __le__ = __matmul__ = _refuse


def fingerprint(tensor: torch.Tensor) -> bytes:
    """A hash of a sample of a tensor's bytes: of the beginning, and of elements spread over the whole."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 1024)
    sample = torch.cat((flat[: _SAMPLE_BYTES // max(1, flat.element_size())], flat[::step])).contiguous()
    return xxhash.xxh3_64_digest(bytes_of(sample))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes."""
    return bytes_of(tensor).tobytes()


def tensor_of(dtype: str, shape: list[int], raw: bytes) -> torch.Tensor:
    """A new tensor from recorded bytes."""
    kind = getattr(torch, dtype)
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


class Snapshot:
    """One walk over the user's variables at a boundary.

    stepped    data pointers of the storages that optimizers update; these are repaired from a peer, not recorded
    blobs      tensors to write behind the plain part: modules' buffers, and weights that no optimizer updates
    generator_loops   loops that are under way in suspended generators of the user's
    """

    def __init__(self, stepped: frozenset[int]) -> None:
        self.stepped = stepped
        self.blobs: list[torch.Tensor] = []
        self.generator_loops: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # ids stay valid only as long as the objects live

    def variables(self, scope: dict[str, Any]) -> dict[str, Any]:
        """Nodes of a frame's variables; modules, functions and dunder names are left out."""
        found = {}
        for name, value in scope.items():
            if name.startswith("__"):
                continue
            node = self.node(value, 0)
            if node.__class__ is not list or node[0] is not Tag.OPAQUE:
                found[name] = node
        return found

    def loop(self, loop: loops.Loop) -> dict[str, Any]:
        """A loop that is under way, and what it runs over if that is a generator of the user's."""
        return dict(loop.record(), over=self.node(loop.over, 0))

    def _number(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return number

    def node(self, value: Any, depth: int) -> Any:
        """The node of one value."""
        kind = value.__class__
        if kind in SCALARS:
            return value if kind is not int or value in _INT64 else [Tag.BIG_INT, str(value)]
        if depth > MAX_DEPTH:
            return [Tag.OPAQUE]
        handler = _HANDLERS.get(kind)
        if handler is None:
            handler = _HANDLERS[kind] = _handler_for(kind)
        if handler is _opaque:
            return [Tag.OPAQUE]
        known = self._numbers.get(id(value))
        if known is not None:
            return [Tag.REFERENCE, known]
        return handler(self, value, depth)

    def items(self, values: Any, depth: int) -> list[Any]:
        """Nodes of a container's items, fast where all are scalars."""
        if set(map(type, values)) <= _PLAIN:
            return list(values)
        return [self.node(value, depth + 1) for value in values]

    def attributes(self, scope: dict[str, Any], depth: int, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Nodes of an object's attributes, the opaque ones left out."""
        found = {}
        for name, value in scope.items():
            if name.__class__ is str and name not in without:
                node = self.node(value, depth + 1)
                if node.__class__ is not list or node[0] is not Tag.OPAQUE:
                    found[name] = node
        return found


_PLAIN = frozenset({float, bool, str, type(None)})
Handler = Callable[[Snapshot, Any, int], Any]
_HANDLERS: dict[type, Handler] = {}


def _opaque(snapshot: Snapshot, value: Any, depth: int) -> Any:
    return [Tag.OPAQUE]


def _sequence(tag: Tag) -> Handler:
    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        number = snapshot._number(value)
        if len(value) > LONG_CONTAINER:
            return [Tag.LONG, len(value)]
        return [tag, number, snapshot.items(value, depth)]

    return handle


def _mapping(snapshot: Snapshot, value: Any, depth: int) -> Any:
    number = snapshot._number(value)
    if len(value) > LONG_CONTAINER:
        return [Tag.LONG, len(value)]
    items = []
    for key, item in value.items():
        if key.__class__ not in SCALARS and key.__class__ is not tuple:
            continue
        node = snapshot.node(item, depth + 1)
        if node.__class__ is not list or node[0] is not Tag.OPAQUE:
            items.append([snapshot.node(key, depth + 1), node])
    return [Tag.DICT, number, items]


def _object(without: frozenset[str] = frozenset()) -> Handler:
    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        number = snapshot._number(value)
        scope = getattr(value, "__dict__", None)
        if scope is None:
            return [Tag.OPAQUE]
        return [Tag.OBJECT, number, value.__class__.__qualname__, snapshot.attributes(scope, depth, without)]

    return handle


def _user_class(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A class of the user's: its plain attributes may be counters; a class of somebody else's is left alone."""
    if not _is_of_user(value):
        return [Tag.OPAQUE]
    number = snapshot._number(value)
    found = {
        name: item for name, item in vars(value).items() if not name.startswith("__") and item.__class__ in SCALARS
    }
    return [Tag.OBJECT, number, value.__qualname__, snapshot.attributes(found, depth)] if found else [Tag.OPAQUE]


def _tensor(snapshot: Snapshot, value: torch.Tensor, depth: int) -> Any:
    if value.layout is not torch.strided or value.is_meta:
        return [Tag.OPAQUE]
    if value.untyped_storage().data_ptr() in snapshot.stepped and value.numel():
        return [Tag.OPAQUE]
    shape = list(value.shape)
    dtype = str(value.dtype)[6:]
    if value.nbytes <= SMALL_TENSOR_BYTES:
        return [Tag.TENSOR, snapshot._number(value), dtype, shape, raw_bytes(value)]
    if value.grad_fn is not None:
        return [Tag.ACTIVATION, shape]
    return [Tag.DATA, dtype, shape, fingerprint(value)]


def _module(snapshot: Snapshot, value: torch.nn.Module, depth: int) -> Any:
    """A module: the tensors that no optimizer updates (buffers, averaged weights), and user classes' attributes."""
    number = snapshot._number(value)
    tensors = []
    attributes = {}
    layout = _layouts.get(value)
    if layout is None or layout.version != _registrations or layout.stepped is not snapshot.stepped:
        layout = _layouts[value] = _Layout(value, snapshot.stepped)
    for path, module, name in layout.tensors:
        tensor = module._buffers.get(name, module._parameters.get(name))
        if tensor is None or id(tensor) in snapshot._numbers:
            continue
        snapshot._number(tensor)
        tensors.append([path, len(snapshot.blobs), list(tensor.shape)])
        snapshot.blobs.append(tensor.detach().contiguous())
    for prefix, module in layout.of_user:
        if module is value or id(module) not in snapshot._numbers:
            if module is not value:
                snapshot._number(module)
            found = snapshot.attributes(module.__dict__, depth, _MODULE_INTERNALS)
            if found:
                attributes[prefix] = found
    return [Tag.MODULE, number, tensors, attributes]


class _Layout:
    """What of a module has to be recorded; found once, and again when anything is registered in any module.

    tensors   (path, owner, name) of buffers and of weights that no optimizer updates
    of_user   (path, module) of the modules of the user's own classes
    """

    def __init__(self, root: torch.nn.Module, stepped: frozenset[int]) -> None:
        self.version = _registrations
        self.stepped = stepped
        self.tensors: list[tuple[str, torch.nn.Module, str]] = []
        self.of_user: list[tuple[str, torch.nn.Module]] = []
        for prefix, module in root.named_modules():
            for name, tensor in (*module._buffers.items(), *module._parameters.items()):
                if tensor is not None and tensor.untyped_storage().data_ptr() not in stepped:
                    self.tensors.append((f"{prefix}.{name}" if prefix else name, module, name))
            if _is_of_user(type(module)):
                self.of_user.append((prefix, module))


_layouts: weakref.WeakKeyDictionary[torch.nn.Module, _Layout] = weakref.WeakKeyDictionary()
_registrations = 0


def _note_registration(*_: Any) -> None:
    global _registrations
    _registrations += 1


register_module_module_registration_hook(_note_registration)
register_module_buffer_registration_hook(_note_registration)
register_module_parameter_registration_hook(_note_registration)


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__)


def _optimizer(snapshot: Snapshot, value: torch.optim.Optimizer, depth: int) -> Any:
    number = snapshot._number(value)
    without = frozenset({"params"})
    return [Tag.OPTIMIZER, number, [snapshot.attributes(group, depth, without) for group in value.param_groups]]


def _torch_generator(snapshot: Snapshot, value: torch.Generator, depth: int) -> Any:
    if value is torch.default_generator:
        return [Tag.OPAQUE]
    snapshot._number(value)
    return [Tag.GENERATOR_STATE, "torch", raw_bytes(value.get_state())]


def _python_random(snapshot: Snapshot, value: random.Random, depth: int) -> Any:
    snapshot._number(value)
    version, words, gauss = value.getstate()
    return [Tag.GENERATOR_STATE, "python", [version, list(words), gauss]]


def _numpy_generator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    snapshot._number(value)
    return [Tag.GENERATOR_STATE, "numpy", snapshot.node(value.bit_generator.state, depth + 1)]


def _numpy_legacy(snapshot: Snapshot, value: Any, depth: int) -> Any:
    snapshot._number(value)
    return [Tag.GENERATOR_STATE, "numpy-legacy", random_state.pack_numpy_legacy(value.get_state(legacy=False))]


def _numpy_array(snapshot: Snapshot, value: Any, depth: int) -> Any:
    if value.dtype.hasobject:
        return [Tag.OPAQUE]
    if value.nbytes <= SMALL_TENSOR_BYTES:
        return [Tag.ARRAY, value.dtype.str, list(value.shape), value.tobytes(), False]
    flat = value.reshape(-1)
    sample = flat[:: max(1, flat.size // 1024)].tobytes()
    return [Tag.ARRAY_DATA, value.dtype.str, list(value.shape), xxhash.xxh3_64_digest(sample)]


def _numpy_scalar(snapshot: Snapshot, value: Any, depth: int) -> Any:
    return [Tag.ARRAY, value.dtype.str, [], value.tobytes(), True]


def _running_generator(snapshot: Snapshot, value: types.GeneratorType[Any, Any, Any], depth: int) -> Any:
    """A generator of the user's that is suspended between two items: its variables are part of the script's state."""
    frame = value.gi_frame
    if frame is None or not is_user_file(frame.f_code.co_filename) or value.gi_running:
        return [Tag.OPAQUE]
    number = snapshot._number(value)
    for loop in loops.of_frame(frame.f_locals, frame.f_lineno):
        snapshot.generator_loops.append(snapshot.loop(loop))
    return [Tag.RUNNING, number, frame.f_lineno, snapshot.variables(frame.f_locals)]


def _is_of_user(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    return bool(filename) and is_user_file(str(filename))


def _handler_for(kind: type) -> Handler:
    """How values of a type are recorded; asked once a type."""
    for base, handler in _BY_BASE:
        if issubclass(kind, base):
            return handler
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _BY_NAME:
        return _BY_NAME[name]
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return _numpy_scalar
    return _object() if _is_of_user(kind) else _opaque


_BY_BASE: list[tuple[type, Handler]] = [
    (type, _user_class),
    (torch.Tensor, _tensor),
    (torch.nn.Module, _module),
    (torch.optim.Optimizer, _optimizer),
    (
        torch.optim.lr_scheduler.LRScheduler,
        _object(frozenset({"optimizer", "lr_lambdas", "anneal_func", "_anneal_func_type", "_scale_fn_ref"})),
    ),
    (torch.amp.grad_scaler.GradScaler, _object(frozenset({"_per_optimizer_states"}))),
    (torch.utils.data.Sampler, _object(frozenset({"dataset", "data_source"}))),
    (torch.utils.data.DataLoader, _object(frozenset({"_iterator", "collate_fn", "worker_init_fn"}))),
    (torch.Generator, _torch_generator),
    (random.SystemRandom, _opaque),  # has no state: `entropy` counts what is drawn from it
    (random.Random, _python_random),
    (types.GeneratorType, _running_generator),
    (types.SimpleNamespace, _object()),
    (BaseException, _opaque),
    (enum.Enum, _opaque),
    (list, _sequence(Tag.LIST)),
    (tuple, _sequence(Tag.TUPLE)),
    (set, _sequence(Tag.SET)),
    (frozenset, _sequence(Tag.FROZENSET)),
    (deque, _sequence(Tag.DEQUE)),
    (dict, _mapping),
    (complex, lambda snapshot, value, depth: [Tag.COMPLEX, value.real, value.imag]),
]
_BY_NAME: dict[str, Handler] = {
    "argparse.Namespace": _object(),
    "numpy.random._generator.Generator": _numpy_generator,
    "numpy.random.mtrand.RandomState": _numpy_legacy,
    "numpy.ndarray": _numpy_array,
}


class Restore:
    """Writes recorded nodes into the variables of a replacement.

    blobs           the modules' tensors, in the order of the snapshot: bytes of each
    mismatches      what the replay should have reproduced and has not: the variable and what differs
    is_comparing    whether large data tensors are compared (at the boundary itself, not on the way to it)
    """

    def __init__(self, blobs: list[memoryview], is_comparing: bool) -> None:
        self.mismatches: list[str] = []
        self._blobs = blobs
        self._is_comparing = is_comparing
        self._objects: dict[int, Any] = {}

    def frame(self, frame: types.FrameType, recorded: dict[str, Any], where: str) -> None:
        """Write a frame's variables; those that are not plain are changed in place."""
        scope = frame.f_locals
        for name, node in recorded.items():
            live = scope.get(name, _MISSING)
            value = self.value(live, node, f"{where}{name}")
            if value is not live and value is not _MISSING:
                set_local(frame, name, value)

    def module(self, scope: dict[str, Any], recorded: dict[str, Any], where: str) -> None:
        """Write the variables of a module that has no frame on the stack."""
        for name, node in recorded.items():
            live = scope.get(name, _MISSING)
            value = self.value(live, node, f"{where}{name}")
            if value is not live and value is not _MISSING:
                scope[name] = value

    def value(self, live: Any, node: Any, name: str) -> Any:
        """The value to put where `live` stands; `live` itself if it was changed in place or is left as it is."""
        if node.__class__ is not list:
            return node
        return _RESTORERS[node[0]](self, live, node, name)

    def remember(self, number: int, value: Any) -> Any:
        """An object of the record has this object as its counterpart here."""
        self._objects[number] = value
        return value

    def items(self, live: Any, nodes: list[Any], name: str) -> list[Any]:
        """Values of a container's items, each set over its counterpart in `live`."""
        have = list(live) if live is not _MISSING else []
        values = [
            self.value(have[i] if i < len(have) else _MISSING, node, f"{name}[{i}]") for i, node in enumerate(nodes)
        ]
        if any(value is _MISSING for value in values):
            raise CannotRestoreError(f"{name} holds objects that are not in the replacement and cannot be recorded")
        return values

    def attributes(self, live: Any, nodes: dict[str, Any], name: str) -> None:
        """Write an object's attributes."""
        scope = vars(live)
        for key, node in nodes.items():
            old = scope.get(key, _MISSING)
            value = self.value(old, node, f"{name}.{key}")
            if value is not old and value is not _MISSING:
                setattr(live, key, value)

    def blob(self, index: int) -> memoryview:
        """The bytes of one blob."""
        return self._blobs[index]

    def is_same(self, condition: bool, name: str, what: str) -> None:
        """Note a mismatch unless `condition` holds."""
        if self._is_comparing and not condition:
            self.mismatches.append(f"{name} {what}")


_MISSING = type("Missing", (), {"__repr__": lambda self: "<not set>"})()
Restorer = Callable[[Restore, Any, list[Any], str], Any]


def _restore_list(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    old = live if isinstance(live, list) else _MISSING
    target = restore.remember(node[1], live if old is not _MISSING else [])
    target[:] = restore.items(list(old) if old is not _MISSING else _MISSING, node[2], name)
    return target


def _restore_deque(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    if not isinstance(live, deque):
        raise CannotRestoreError(f"{name} is a deque in the lost rank and {type(live).__name__} here")
    restore.remember(node[1], live)
    items = restore.items(list(live), node[2], name)
    live.clear()
    live.extend(items)
    return live


def _restore_tuple(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    old = live if isinstance(live, tuple) else _MISSING
    items = restore.items(old, node[2], name)
    if old is not _MISSING and len(old) == len(items) and all(a is b for a, b in zip(old, items, strict=True)):
        return restore.remember(node[1], live)
    kind = type(live) if isinstance(live, tuple) else tuple
    return restore.remember(node[1], kind(*items) if hasattr(kind, "_fields") else tuple(items))


def _restore_set(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    items = restore.items(_MISSING, node[2], name)
    if isinstance(live, set):
        live.clear()
        live.update(items)
        return restore.remember(node[1], live)
    return restore.remember(node[1], frozenset(items) if node[0] == Tag.FROZENSET else set(items))


def _restore_dict(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    target = restore.remember(node[1], live if isinstance(live, dict) else {})
    recorded = set()
    for key_node, item_node in node[2]:
        key = restore.value(_MISSING, key_node, name)
        recorded.add(key)
        old = target.get(key, _MISSING)
        value = restore.value(old, item_node, f"{name}[{key!r}]")
        if value is not old and value is not _MISSING:
            target[key] = value
    for key in [key for key, value in target.items() if key not in recorded and value.__class__ in SCALARS]:
        del target[key]
    return target


def _restore_object(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    found = live.__qualname__ if isinstance(live, type) else type(live).__qualname__
    if live is _MISSING or found != node[2]:
        raise CannotRestoreError(f"{name} is a {node[2]} in the lost rank and {found} in the replacement")
    restore.remember(node[1], live)
    restore.attributes(live, node[3], name)
    return live


def _restore_tensor(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    _, number, dtype, shape, raw = node
    if isinstance(live, torch.Tensor) and list(live.shape) == shape and str(live.dtype)[6:] == dtype:
        if live.layout is torch.strided and raw_bytes(live) == raw and live.grad_fn is None:
            return restore.remember(number, live)
        if isinstance(live, torch.nn.Parameter):
            live.data.copy_(tensor_of(dtype, shape, raw))
            return restore.remember(number, live)
    tensor = tensor_of(dtype, shape, raw)
    if isinstance(live, torch.Tensor) and live.is_leaf and live.requires_grad:
        tensor.requires_grad_()
    return restore.remember(number, tensor)


def _compare_data(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    _, dtype, shape, expected = node
    if not isinstance(live, torch.Tensor):
        restore.is_same(False, name, "is a large tensor in the lost rank and not in the replacement")
    elif list(live.shape) != shape or str(live.dtype)[6:] != dtype:
        restore.is_same(False, name, f"has shape {list(live.shape)} where the lost rank had {shape}")
    else:
        restore.is_same(fingerprint(live) == expected, name, "holds other data than in the lost rank")
    return live


def _compare_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    _, dtype, shape, expected = node
    if getattr(getattr(live, "dtype", None), "str", None) != dtype or list(live.shape) != shape:
        restore.is_same(False, name, "is another array than in the lost rank")
    else:
        flat = live.reshape(-1)
        sample = flat[:: max(1, flat.size // 1024)].tobytes()
        restore.is_same(xxhash.xxh3_64_digest(sample) == expected, name, "holds other data than in the lost rank")
    return live


def _restore_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    numpy = sys.modules["numpy"]
    _, dtype, shape, raw, is_scalar = node
    array = numpy.frombuffer(raw, dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _restore_module(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    if not isinstance(live, torch.nn.Module):
        raise CannotRestoreError(f"{name} is a module in the lost rank and {type(live).__name__} in the replacement")
    restore.remember(node[1], live)
    modules = dict(live.named_modules())
    for path, index, shape in node[2]:
        prefix, _, leaf = path.rpartition(".")
        owner = modules.get(prefix)
        tensor = None if owner is None else owner._buffers.get(leaf, owner._parameters.get(leaf))
        if tensor is None or list(tensor.shape) != shape:
            raise CannotRestoreError(f"{name}.{path} of shape {shape} is not in the replacement")
        raw = restore.blob(index)
        if len(raw):
            tensor.data.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(shape))
    for prefix, attributes in node[3].items():
        if prefix not in modules:
            raise CannotRestoreError(f"{name}.{prefix} is not in the replacement")
        restore.attributes(modules[prefix], attributes, f"{name}.{prefix}")
    return live


def _restore_optimizer(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    if not isinstance(live, torch.optim.Optimizer) or len(live.param_groups) != len(node[2]):
        raise CannotRestoreError(f"{name} is another optimizer than in the lost rank")
    restore.remember(node[1], live)
    for group, recorded in zip(live.param_groups, node[2], strict=True):
        for key, item in recorded.items():
            group[key] = restore.value(group.get(key, _MISSING), item, f"{name}.param_groups.{key}")
    return live


def _restore_random(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    _, kind, state = node
    try:
        if kind == "torch":
            live.set_state(random_state.tensor_from_bytes(state))
        elif kind == "python":
            live.setstate((state[0], tuple(state[1]), state[2]))
        elif kind == "numpy":
            live.bit_generator.state = restore.value(_MISSING, state, name)
        else:
            live.set_state(random_state.unpack_mersenne(state))
    except (AttributeError, TypeError) as error:
        raise CannotRestoreError(f"{name} is another random generator than in the lost rank") from error
    return live


def _restore_running(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    frame = getattr(live, "gi_frame", None)
    if frame is None or frame.f_lineno != node[2]:
        raise CannotRestoreError(f"{name} is a generator that stands elsewhere than in the lost rank")
    restore.remember(node[1], live)
    restore.frame(frame, node[3], f"{name}/")
    return live


def _restore_reference(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    return restore._objects.get(node[1], live)


def _restore_long(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    restore.is_same(hasattr(live, "__len__") and len(live) == node[1], name, "is a long container of another length")
    return live


_RESTORERS: dict[str, Restorer] = {
    Tag.OPAQUE: lambda restore, live, node, name: live,
    Tag.REFERENCE: _restore_reference,
    Tag.BIG_INT: lambda restore, live, node, name: int(node[1]),
    Tag.COMPLEX: lambda restore, live, node, name: complex(node[1], node[2]),
    Tag.LIST: _restore_list,
    Tag.TUPLE: _restore_tuple,
    Tag.SET: _restore_set,
    Tag.FROZENSET: _restore_set,
    Tag.DEQUE: _restore_deque,
    Tag.DICT: _restore_dict,
    Tag.LONG: _restore_long,
    Tag.OBJECT: _restore_object,
    Tag.TENSOR: _restore_tensor,
    Tag.DATA: _compare_data,
    Tag.ACTIVATION: lambda restore, live, node, name: Unrecorded(name, node[1]),
    Tag.MODULE: _restore_module,
    Tag.ARRAY: _restore_array,
    Tag.ARRAY_DATA: _compare_array,
    Tag.GENERATOR_STATE: _restore_random,
    Tag.OPTIMIZER: _restore_optimizer,
    Tag.RUNNING: _restore_running,
}
