"""Read the plain values that a script keeps in its variables.

`Snapshot` walks from the variables of the user's frames through containers and objects, and turns values into nodes
that another process can write into its own variables (restore.py). Every value gets a node: that of a value that can
neither be recorded nor compared says so, and is refused by name when it is needed. kinds.py has the handlers of each
type.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch

from ttprun.capture.position import iterables, loops
from ttprun.capture.records.boundary_record import LoopRecord
from ttprun.capture.records.nodes import (
    FixedNode,
    NotProvedNode,
    Number,
    PlainNode,
    ReferenceNode,
    RefusedNode,
    SameNode,
    TupleNode,
)
from ttprun.capture.records.packing import pack
from ttprun.capture.values.nodes import MAX_DEPTH, SETTLED, is_settled, name_of
from ttprun.capture.values.unchanged import ARE_COUNTED, Remembered, Unchanged, version_of
from ttprun.introspect import fail_open
from ttprun.introspect.looks import is_a

# Names that the interpreter puts into modules; other dunder names are the script's own.
_HIDDEN = """
    __name__ __doc__ __package__ __loader__ __spec__ __annotations__ __builtins__ __file__ __cached__ __path__
    __warningregistry__ __class__ __conditional_annotations__ __annotate__
"""
HIDDEN = frozenset(_HIDDEN.split())
_NOT_DEFINED = (RefusedNode, SameNode)
FIXED = ""  # the name of the packed nodes, in a scope's record, that are the same at each boundary

# Makes the node of a value, as its type needs it: record_... with these three arguments.
#
#   snapshot  the walk that has met it, which gives numbers and gathers blobs
#   value     met for the first time in this walk; not changed
#   depth     of the value: 0 for a variable, one more for each container or object around it
#   returns   a node, see records/nodes.py
#
# What it raises makes a RefusedNode.
Handler = Callable[["Snapshot", Any, int], Any]
HANDLERS: dict[type, Handler] = {}
_choosers: list[Callable[[type], Handler]] = []
_fixed: set[Handler] = set()


def choose_with(chooser: Callable[[type], Handler], fixed: Iterable[Handler]) -> None:
    """Register the function that chooses, once for each type, how its values are recorded.

    fixed    handlers whose SameNodes depend on the type or name alone
    """
    _choosers[:] = [chooser]
    _fixed.update(fixed)


_MOST_LETTERS = 100  # of an error
MAX_OBJECTS = 200_000  # about one second
_FRAMES = 2_000  # of the deepest walk, at most
# Of what torch.compile adds to modules.
_HIDDEN_PREFIXES = (
    *("__compiled_fn_", "__resume_at_", "__import_", "__builtins_dict__", "__comprehension_", "__gen_rand_values"),
    *("__warnings_warn_wrapper", "___"),
)


def is_hidden(name: str) -> bool:
    """Whether a variable is not the script's."""
    return name.startswith("__") and (name in HIDDEN or name.startswith(_HIDDEN_PREFIXES))


class _Scope:
    """What is remembered of one scope from earlier boundaries.

    fixed       variables whose object has the same node at each boundary: functions, modules, numbers, paths, ...
    packed      the nodes of `fixed`
    moving      names whose node must be computed at each boundary
    rest        names of the scope that are neither hidden nor fixed
    """

    __slots__ = ("_lasting", "_names", "_sizes", "_version", "_watched", "fixed", "moving", "packed", "rest", "stepped")

    def __init__(self, stepped: Any, lasting: dict[str, Any] | None) -> None:
        self.stepped = stepped
        self._lasting = lasting
        self._version = -1
        self._names: list[str] = []
        self._watched: dict[str, Any] = {}  # the functions and classes in `fixed`, which may get attributes
        self._sizes: list[int] = []  # number of attributes of each of those
        self.fixed: dict[str, Any] = {}
        self.moving: set[str] = set()
        self.packed = FixedNode(b"")
        self.rest: list[str] = []

    def look_at(self, scope: dict[str, Any]) -> None:
        """Update this at a boundary."""
        has_sizes = self._sizes_now() == self._sizes
        if self._lasting is scope:
            version = version_of(scope)  # what it holds is not kept: it may have to go, or be resized
            if ARE_COUNTED and self._names and has_sizes and version == self._version:
                return
            self._version = version
        names, fixed = list(scope), self.fixed
        is_named_alike = names == self._names
        is_held = is_named_alike or fixed.keys() <= scope.keys()
        if not (has_sizes and is_held and all(map(is_, map(scope.__getitem__, fixed), fixed.values()))):
            sizes = zip(self._watched, self._sizes, self._sizes_now(), strict=True)
            self.moving.update(name for name, before, now in sizes if before != now)
            self.moving.update(name for name, value in fixed.items() if scope.get(name, self) is not value)
            self.fixed, self._watched, self._sizes = {}, {}, []  # the others become fixed again
        elif is_named_alike:
            return
        self._names = names
        self._update_rest()

    def _sizes_now(self) -> list[int]:
        return list(map(len, map(_attributes_of, self._watched.values())))

    def settle(self, new: Iterable[str], scope: Mapping[str, Any]) -> None:
        """Add variables to `fixed`, which must be packed again then."""
        self.fixed.update((name, scope[name]) for name in new)
        self._watched = {name: value for name, value in self.fixed.items() if is_a(value, FunctionType | type)}
        self._sizes = self._sizes_now()
        self._update_rest()

    def _update_rest(self) -> None:
        self.rest = [name for name in self._names if name not in self.fixed and not is_hidden(name)]


_scopes: Remembered[_Scope] = Remembered()
_attributes_of = attrgetter("__dict__")
# By the id of an object's dictionary: (names that have no node, nodes of the others, all settled, the dictionary).
_attributes: Remembered[tuple[frozenset[str], dict[str, Any], Unchanged]] = Remembered()


class Snapshot:
    """One walk over the user's variables at a boundary.

    stepped    data pointers of the storages that optimizers update, with their order; these are repaired from a peer
    followed   ids of the iterators that active loops use: their positions are recorded with the loops
    is_separate the nodes are compared or kept by themselves: they hold small tensors' bytes, and no blobs are written
    blobs      tensors to write after the plain part, each a `plain` one: modules' buffers, weights that no optimizer
               updates, and tensors too large to be copied twice
    not_proved types of the objects met that can change and are not recorded
    computed   tensors met that were computed with gradients, except views of what optimizers update
    generator_loops   active loops in suspended generators of the user's
    numbers    number of each object met so far, by its id; None of one that no node defines
    rows       the same, of the objects in each container that holds very many
    storages   number of the tensor, or large array, with which a storage was recorded, by the storage's address
    memories   (address, end, number) of each small numpy array with memory of its own
    arrays     (hash, whether it has ever changed) of each large numpy array met so far, by its id
    parts      number of the first tensor met of which only the elements are recorded, by its storage's address
    """

    has_limit = True  # of MAX_OBJECTS

    def __init__(self, stepped: Mapping[int, int], followed: Iterable[int] = (), is_separate: bool = False) -> None:
        self.stepped = stepped
        self.is_separate = is_separate
        self.followed = set(followed)
        self.blobs: list[torch.Tensor] = []
        self.not_proved: list[str] = []
        self.computed: list[torch.Tensor] = []
        self.generator_loops: list[LoopRecord] = []
        self.numbers: dict[int, int | None] = {}
        self.rows: list[dict[int, int]] = []
        self.storages: dict[int, int] = {}
        self.memories: list[tuple[int, int, int]] = []
        self.arrays: dict[int, tuple[bytes, bool]] = {}
        self.parts: dict[int, int] = {}
        self.alive: list[Any] = []  # ids stay valid only as long as the objects live

    def variables(self, scope: dict[str, Any], key: Hashable = None, is_lasting: bool = False) -> dict[str, Any]:
        """Nodes of a scope's variables.

        key         identifies the scope at each boundary, so that unchanged values are packed only once
        is_lasting  the scope is a module's, whose dictionary is the same at each boundary
        """
        if key is None:
            return {name: self.node(value, 0) for name, value in scope.items() if not is_hidden(name)}
        known = _scopes.get(key)
        if known is None or known.stepped is not self.stepped:
            known = _Scope(self.stepped, scope if is_lasting else None)
            _scopes.keep(key, known)
        known.look_at(scope)
        found = {}
        for name in known.rest:
            value = scope[name]
            found[name] = value if type(value) in SETTLED else self.node(value, 0)
        if not known.moving.issuperset(found):
            self._settle(known, scope, found)
        if known.fixed:
            found[FIXED] = known.packed
        return found

    def _settle(self, known: _Scope, scope: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Move nodes that will be the same at the next boundary from `found` to `known`."""
        unknown = [name for name in found if name not in known.moving]
        new = [name for name in unknown if _is_fixed(scope[name], found[name])]
        known.moving.update(unknown)
        known.moving.difference_update(new)
        if not new:
            return
        for name in new:
            del found[name]
        known.settle(new, scope)
        known.packed = FixedNode(pack({name: self.node(value, 0) for name, value in known.fixed.items()}))

    def loop(self, loop: loops.Loop) -> LoopRecord:
        """An active loop, with what it iterates over if its position does not determine that."""
        return loop.record(self.over(loop))

    def over(self, loop: loops.Loop) -> Any:
        """The node of what an active loop iterates over; None if its position determines that."""
        over = iterables.over(loop)
        is_within = type(over) is tuple
        return TupleNode([self._around_loader(items) for items in over]) if is_within else self.node(over, 0)

    def _around_loader(self, items: Any) -> Any:
        if type(items) is itertools.cycle and id(items) not in self.numbers:
            why = "is a cycle that gathers what it will hand out again: batches of a DataLoader, or a generator's items"
            return RefusedNode(why)
        return self.node(items, 1)

    def number(self, value: Any) -> Number:
        """The number of an object that is met for the first time."""
        number = Number(len(self.numbers))
        self.numbers[id(value)] = number
        self.alive.append(value)
        return number

    def node(self, value: Any, depth: int) -> Any:
        """The node of one value.

        depth   as for a Handler
        """
        kind = type(value)
        if kind in SETTLED:
            return value
        handler = HANDLERS.get(kind)
        if handler is None:
            handler = HANDLERS[kind] = _choosers[0](kind)
        known = self.numbers.get(id(value))
        if known is None and self.rows:
            known = next((numbers[id(value)] for numbers in self.rows if id(value) in numbers), None)
        if known is not None:
            return ReferenceNode(known)
        if len(self.alive) > MAX_OBJECTS and self.has_limit:
            return self._not_proved(kind, f"it comes after the {MAX_OBJECTS:,} objects that are recorded at each step")
        if depth > MAX_DEPTH:
            return self._not_proved(kind, f"it is nested more than {MAX_DEPTH} deep")
        try:
            made = handler(self, value, depth)
        except Exception as error:  # e.g. another thread is changing it: record the others
            fail_open.raise_if_meant(error)
            made = RefusedNode(f"raised {type(error).__name__} when it was read: {str(error)[:_MOST_LETTERS]}")
        if type(made) in _NOT_DEFINED and id(value) in self.numbers:
            self.numbers[id(value)] = None  # where it is met again it is judged by that place: here it may be dead
        return made

    def _not_proved(self, kind: type, why: str) -> NotProvedNode:
        self.not_proved.append(name_of(kind))
        return NotProvedNode(name_of(kind), why)

    def separate_node(self, value: Any, depth: int) -> Any:
        """The node of a value, from a walk of its own, which leaves no trace in this one."""
        return Snapshot(self.stepped, is_separate=True).node(value, depth)

    def items(self, values: Any, depth: int) -> list[Any]:
        """Nodes of a container's items, fast where all are scalars.

        depth   of the container
        """
        if set(map(type, values)) <= SETTLED:
            return list(values)
        return [self.node(value, depth + 1) for value in values]

    def attributes(self, scope: Mapping[str, Any], depth: int, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Nodes of an object's attributes.

        scope     the object's dictionary, or the same made from its slots; only names that are a str count
        depth     of the object
        without   names that are left out
        """
        return {
            name: value if type(value) in SETTLED else self.node(value, depth + 1)
            for name, value in scope.items()
            if type(name) is str and name not in without
        }

    def lasting_attributes(self, scope: dict[str, Any], depth: int, without: frozenset[str]) -> dict[str, Any]:
        """Nodes of an object's own dictionary, which is not walked again while it is unchanged.

        scope            the object's own __dict__, known by its id
        depth, without   as for `attributes`; the same frozenset each time
        """
        known = _attributes.get(id(scope))
        if known is not None and known[0] is without and known[2].holds():
            return known[1]
        nodes = self.attributes(scope, depth, without)
        if all(map(is_settled, nodes.values())):
            _attributes.keep(id(scope), (without, nodes, Unchanged((scope,))))
        return nodes


@contextlib.contextmanager
def room_to_walk() -> Iterator[None]:
    """Raise Python's recursion limit for a deep walk."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _is_fixed(value: Any, node: Any) -> bool:
    """Whether the same object has the same node at each boundary."""
    if type(value) is FunctionType and value.__dict__:
        return False
    if is_settled(node):
        return True
    return HANDLERS[type(value)] in _fixed if isinstance(node, SameNode) else isinstance(node, PlainNode)
