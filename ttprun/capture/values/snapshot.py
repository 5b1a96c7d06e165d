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
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ttprun.capture.position import iterables, loops
from ttprun.capture.records.nodes import (
    NotProvedNode,
    Number,
    PlainNode,
    ReferenceNode,
    RefusedNode,
    SameNode,
    TupleNode,
)
from ttprun.capture.records.packing import MAX_DEPTH, SETTLED, LoopRecord, name_of, unpack_named
from ttprun.capture.values.changes import Remembered
from ttprun.capture.values.kept import Names, Price, Trace, lasting_numbers
from ttprun.introspect import fail_open

# Names that the interpreter puts into modules; other dunder names are the script's own.
_HIDDEN = """
    __name__ __doc__ __package__ __loader__ __spec__ __annotations__ __builtins__ __file__ __cached__ __path__
    __warningregistry__ __class__ __conditional_annotations__ __annotate__
"""
HIDDEN = frozenset(_HIDDEN.split())
_NOT_DEFINED = (RefusedNode, SameNode)
NONE = frozenset[str]()
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


class _Handlers(dict[type, Handler]):
    """How values of each type are recorded: `choose` is asked once for each, and set by kinds.py."""

    choose: Callable[[type], Handler]

    def __missing__(self, kind: type) -> Handler:
        self[kind] = chosen = self.choose(kind)
        return chosen


HANDLERS = _Handlers()
_tracing: set[Handler] = set()


def traces(handler: Handler) -> Handler:
    """A decorator, of a handler that notes in `Snapshot.trace` what its nodes depend on; of others it is not known."""
    _tracing.add(handler)
    return handler


_MOST_LETTERS = 100  # of an error
_UNTOLD = "it can change, and does not show its state"
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


def with_fixed(scope: dict[str, Any]) -> dict[str, Any]:
    """A scope's nodes, including the packed ones that are the same at each boundary, which come first."""
    if FIXED not in scope:
        return scope
    return unpack_named(scope[FIXED].packed) | {name: node for name, node in scope.items() if name != FIXED}


def _shown(scope: dict[str, Any]) -> list[str]:
    return [name for name in scope if not is_hidden(name)]


LEFT: dict[Hashable, dict[str, type]] = {}  # by the key of a scope: variables that are left alone, and their types
_scopes: Remembered[tuple[Any, Names]] = Remembered()  # with what optimizers update
_numbers: Remembered[int] = Remembered()  # by id: of what has died another object may have it
_attributes: Remembered[tuple[Any, Names]] = Remembered()  # by the id of an object's dictionary; with what is left out


class Snapshot:
    """One walk over the user's variables at a boundary.

    stepped    data pointers of the storages that optimizers update, with their order; these are repaired from a peer
    followed   ids of the iterators that active loops use: their positions are recorded with the loops
    is_separate the nodes are compared or kept by themselves: they hold small tensors' bytes, and no blobs are written
    blobs      tensors to write after the plain part, each a `plain` one, or one on a device: modules' buffers, weights
               that no optimizer updates, and tensors too large to be copied twice
    not_proved types of the objects met that can change and are not recorded
    computed   tensors met that were computed with gradients, except views of what optimizers update
    generator_loops   active loops in suspended generators of the user's
    numbers    number of each object met so far, by its id; None of one that no node defines
    rows       the same, of the objects in each container that holds very many
    data       the pieces met that have samples (`DataPiece`, long_items.py)
    storages   number of the tensor, or large array, with which a storage was recorded, by the storage's address
    memories   (address, end, number) of each small numpy array with memory of its own
    arrays     (hash, whether it has ever changed) of each large numpy array met so far, by its id
    trace      what the nodes so far depend on
    is_keeping the nodes that are made may be kept
    parts      number of the first tensor met of which only the elements are recorded, by its storage's address
    prices     what each variable's walk has taken, in the order of their ends; None: it is not measured
    """

    has_limit = True  # of MAX_OBJECTS

    def __init__(
        self,
        stepped: Mapping[int, int],
        followed: Iterable[int] = (),
        is_separate: bool = False,
        prices: list[Price] | None = None,
    ) -> None:
        self.stepped = stepped
        self.prices = prices
        self.is_separate = is_separate
        self.followed = set(followed)
        self.blobs: list[torch.Tensor] = []
        self.not_proved: list[str] = []
        self.computed: list[torch.Tensor] = []
        self.generator_loops: list[LoopRecord] = []
        self.numbers: dict[int, int | None] = {}
        self.rows: list[dict[int, int]] = []
        self.data: list[Any] = []
        self.storages: dict[int, int] = {}
        self.memories: list[tuple[int, int, int]] = []
        self.arrays: dict[int, tuple[bytes, bool]] = {}
        self.parts: dict[int, int] = {}
        self.trace = Trace()
        self.is_keeping = False
        self.alive: list[Any] = []  # ids stay valid only as long as the objects live

    def variables(self, scope: dict[str, Any], key: Hashable = None, is_lasting: bool = False) -> dict[str, Any]:
        """Nodes of a scope's variables.

        key         identifies the scope at each boundary, so that unchanged values are packed only once
        is_lasting  the scope is a module's, whose dictionary is the same at each boundary
        """
        if key is None:
            return {name: self.node(value, 0) for name, value in scope.items() if not is_hidden(name)}
        entry = _scopes.get(key)
        if entry is None or entry[0] is not self.stepped:
            entry = (self.stepped, Names(_shown, LEFT.setdefault(key, {})))
            _scopes.keep(key, entry)
        names = entry[1]
        nodes = names.nodes(self, scope, 0, is_lasting)
        return {FIXED: names.entered.packed} | nodes if names.entered is not None else nodes

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
            return RefusedNode(why, "iterator-read-by-next")
        return self.node(items, 1)

    def owner_of(self, address: int) -> tuple[int | None, int]:
        """(number, bytes before the address) of the sample in whose memory an address lies; (None, 0) if in none."""
        owners = (piece.owner_of(address) for piece in self.data)
        return next((owner for owner in owners if owner is not None), (None, 0))

    def number(self, value: Any) -> Number:
        """The number of an object that is met for the first time: the same at each boundary."""
        key = id(value)
        if self.is_separate:  # the nodes are compared with another process's
            number = len(self.numbers)
        else:
            now = _numbers.now  # and no call: this is done for each object at each boundary
            now[key] = number = _numbers.before.get(key) or now.get(key) or lasting_numbers(1)
        self.numbers[key] = number
        self.alive.append(value)
        return Number(number)

    def kept_node(self, value: Any, depth: int) -> Any:
        """As `node`, of nodes that may be kept."""
        self.is_keeping = True
        try:
            return value if type(value) in SETTLED else self.node(value, depth)
        finally:
            self.is_keeping = False

    def node(self, value: Any, depth: int) -> Any:
        """The node of one value.

        depth   as for a Handler
        """
        kind = type(value)
        if kind in SETTLED:
            return value
        handler = HANDLERS[kind]
        number = self.numbers.get(id(value))
        if number is None and self.rows:
            number = next((numbers[id(value)] for numbers in self.rows if id(value) in numbers), None)
        if number is not None:
            self.trace.referred.append((id(value), number))
            return ReferenceNode(number)
        if len(self.alive) > MAX_OBJECTS and self.has_limit:
            return self.unproved(kind, f"it comes after the {MAX_OBJECTS:,} objects that are recorded at each step")
        if depth > MAX_DEPTH:
            return self.unproved(kind, f"it is nested more than {MAX_DEPTH} deep")
        try:
            made = handler(self, value, depth)
        except Exception as error:  # e.g. another thread is changing it: record the others
            fail_open.raise_if_meant(error)
            text = textwrap.shorten(str(error), _MOST_LETTERS, placeholder="...")
            made = RefusedNode(f"raised {type(error).__name__} when it was read: {text}")
        if type(made) is RefusedNode or (
            handler not in _tracing and not (type(made) is PlainNode and made.kind != "class")
        ):
            self.trace.open += 1
        if type(made) in _NOT_DEFINED and id(value) in self.numbers:
            self.numbers[id(value)] = None  # where it is met again it is judged by that place: here it may be dead
        return made

    def unproved(self, kind: type, why: str = _UNTOLD) -> NotProvedNode:
        """The node of an object of which only the type is known.

        why   completes the variable's name in a sentence: "it is nested too deep"
        """
        self.trace.open += 1
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

    def names_of(
        self, scope: dict[str, Any], without: frozenset[str] = NONE, only: Collection[str] | None = None
    ) -> Names:
        """What is remembered of the names of an object's own dictionary.

        scope     the object's own __dict__, known by its id
        without   names that are left out; the same frozenset each time
        only      the names that count, the same each time; None: all
        """
        key, now = id(scope), _attributes.now  # and no call: this is done for each object at each boundary
        entry = _attributes.before.get(key) or now.get(key)
        left_out = without if only is None else only
        if entry is not None and entry[0] is left_out:
            now[key] = entry
        else:

            def choose(names: dict[str, Any]) -> list[str]:
                own = names if only is None else filter(names.__contains__, only)
                return [name for name in own if type(name) is str and name not in without]

            entry = (left_out, Names(choose))
            now[key] = entry
        return entry[1]

    def lasting_attributes(self, names: Names, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        """Nodes of an object's own dictionary; what of it has not changed is not walked over again.

        names   as `names_of` returns them
        depth   of the object
        """
        if self.is_separate:
            return {
                name: value if type(value := scope[name]) in SETTLED else self.node(value, depth + 1)
                for name in names.choose(scope)
            }
        nodes = names.nodes(self, scope, depth + 1, True)
        kept = names.entered
        return nodes if kept is None else kept.nodes | nodes if nodes else kept.nodes


@contextlib.contextmanager
def room_to_walk() -> Iterator[None]:
    """Raise Python's recursion limit for a deep walk."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
